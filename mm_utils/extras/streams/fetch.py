"""Copy the files of an address (s3://, gs://, hf://, https://), so that preparing reads them like any file of a disk.

Preparing reads every row whole, and reads again what a killed job had begun; so each file comes once, and the result is that of a
local copy to the byte. A later start fetches those files only whose size or date at the store is another.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tqdm.auto import tqdm

from mm_utils.data.rows.source import Source
from mm_utils.distributed import RunError
from mm_utils.extras.streams.rows import store_of
from mm_utils.extras.streams.shards import damage, expand, patiently, stamp_of
from mm_utils.files import write_atomic
from mm_utils.stored import key_of
from mm_utils.text import one_line

AT_ONCE = 8  # files that are copied at a time
_ROOM = 1 << 30  # bytes that stay free


def fetched(source: Source, folder: Path) -> Source:
    """Return a source as it is, or one of the copies in `folder` of the files that its address stands for.

    An address is that of a file, of a folder with all below it, or a pattern with ``*``, ``{000..099}`` or ``{a,b}``. A file
    comes under its last name after all its bytes have come.

    Raises:
        ValueError: if there is no file, or one cannot be fetched.
        RunError: if the store needs a package that is not installed, or the disk has no room for the files.
    """
    if "://" not in source.path:
        return source
    urls, top = _files_of(source)
    place = folder / key_of(source.path)[:16]
    copies = {url: place / url[len(top) :] for url in urls}
    noted = place.with_suffix(".json")
    known = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stamps = dict(zip(urls, pool.map(stamp_of, urls), strict=True))
    for path in {each for each in place.rglob("*") if each.is_file()} - {*copies.values()}:
        path.unlink()  # no longer at the store, or not whole
    lacking = {url: copies[url] for url in urls if known.get(url) != stamps[url] or not copies[url].is_file()}
    sizes = {url: int(json.loads(stamps[url])[1] or 0) for url in lacking}
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if sum(sizes.values()) > free - _ROOM:
        raise RunError(
            f"{source.title}; its files have {sum(sizes.values()) / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free where they "
            "are copied to. Prepare it in parts, or give an --output_dir on a larger disk."
        )
    _copy(source, lacking, sizes)
    write_atomic(noted, json.dumps(stamps))
    return replace(source, path=str(place / source.path[len(top) :]))


def _files_of(source: Source) -> tuple[list[str], str]:
    """Return the addresses of all files, and the part of the source's address that stands for the folder of its copies."""
    address = source.path
    files, path = store_of(address)
    first = min((address.find(sign) for sign in "*[{" if sign in address), default=len(address))
    if first == len(address) and not address.startswith("http") and patiently(files.isdir, path):
        top = address.rstrip("/") + "/"
        urls = sorted(files.unstrip_protocol(each) for each in patiently(files.find, path))
    else:
        top = address[: address.rindex("/", 0, first) + 1]
        urls = expand(address)
    urls = [url for url in urls if not url.endswith("/")]  # folders are objects for some stores
    if not urls:
        raise ValueError(f"{source.title}; there is no file below it. Check the address.")
    odd = next((url for url in urls if not url.startswith(top) or ".." in url.split("/")), None)
    if odd is not None:
        raise ValueError(f"{source.title}; {odd} cannot be copied from it. Check the address.")
    return urls, top


def _copy(source: Source, lacking: dict[str, Path], sizes: dict[str, int]) -> None:
    def copy(url: str) -> None:
        files, path = store_of(url)
        partial = lacking[url].with_name(f"{lacking[url].name}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        patiently(lambda _: files.get_file(path, str(partial)), url)
        if partial.stat().st_size != sizes[url] > 0:
            raise OSError(f"{partial.stat().st_size:,} of {sizes[url]:,} bytes came")
        partial.replace(lacking[url])
        bar.update(sizes[url])

    total = sum(sizes.values())
    with (
        tqdm(total=total, desc=f"Fetching {source.name}", unit="B", unit_scale=True, disable=not lacking) as bar,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for url, done in {url: pool.submit(copy, url) for url in lacking}.items():
            try:
                done.result()
            except damage() as error:
                pool.shutdown(wait=False, cancel_futures=True)
                raise ValueError(
                    f"{source.title}; {url} cannot be fetched ({one_line(error)}). Check the connection and the disk: the same command "
                    "goes on with what has come."
                ) from error
