"""Copy a prepared set to an address (s3://, gs://), such that what a killed copy left is never taken for a set.

`MARK` is the first file at the address, before the rows are read, which shows that the address can be written; it then says which rows
are copied. `LAST` follows all other files, and files without it are not a set. A second copy of the same rows sends what is missing.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from mm_utils.extras.streams.fetch import AT_ONCE
from mm_utils.extras.streams.rows import store_of
from mm_utils.extras.streams.shards import content_of, damage, patiently
from mm_utils.text import one_line

MARK, LAST = "unfinished", "report.json"


class Destination:
    """An address that a prepared set is copied to.

    Raises:
        RunError: if its store needs a package that is not installed.
    """

    def __init__(self, address: str):
        self.address = address
        self.files, self.top = store_of(address)

    def claim(self, overwrite: bool, sources: Sequence[str]) -> None:
        """Write `MARK`.

        Raises:
            ValueError: if something is there that may not be replaced, or the store cannot be reached or written.
        """
        there, reason = self._there(), ""
        if any(f"{each.partition(',')[0]}/".startswith(f"{self.address}/") for each in sources):
            reason = "a source is read from it"
        elif there and not {MARK, LAST} & there:
            reason = "it holds no prepared data set but something else, which is not removed"
        elif LAST in there and not overwrite:
            reason = "it is not empty. Replace it with --overwrite_output_dir, or give another address"
        if reason:
            raise ValueError(f"--output_dir is {self.address}; {reason}.")
        with self._in_a_line():
            self._mark(self._marked() if MARK in there else b"")

    def send(self, folder: Path) -> None:
        """Copy a folder, and remove what else is there.

        Raises:
            ValueError: if a file cannot be copied; the next call goes on there.
        """
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        rows = json.loads((folder / LAST).read_text(encoding="utf-8"))["fingerprint"].encode()

        def put(name: str) -> None:
            url, content = f"{self.address}/{name}", content_of(str(folder / name))
            if name not in kept or patiently(content_of, url) != content:
                patiently(lambda _: self.files.put_file(str(folder / name), f"{self.top}/{name}"), url)
                if patiently(content_of, url) != content:
                    raise OSError(f"{name} is not there as it was sent")
            bar.update(sizes[name])

        with self._in_a_line(), tqdm(total=sum(sizes.values()), desc="Copying", unit="B", unit_scale=True) as bar:
            there = self._there()
            kept = there & sizes.keys() - {LAST} if self._marked() == rows else set()
            for name in sorted(there - kept - {MARK}, key=LAST.__ne__):  # LAST is the first to go
                self._remove(name)
            self._mark(rows)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                try:
                    for done in [pool.submit(put, name) for name in sorted(sizes) if name != LAST]:
                        done.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            put(LAST)
            self._remove(MARK)

    def _mark(self, rows: bytes) -> None:
        patiently(lambda _: self.files.pipe_file(f"{self.top}/{MARK}", rows), self.address)

    def _marked(self) -> bytes:
        return patiently(lambda _: self.files.cat_file(f"{self.top}/{MARK}"), self.address)

    def _remove(self, name: str) -> None:
        patiently(lambda _: self.files.rm_file(f"{self.top}/{name}"), self.address)

    def _there(self) -> set[str]:
        """Return the names of the files at the address, relative to it."""
        with self._in_a_line():
            self.files.invalidate_cache()
            found = patiently(lambda _: self.files.find(self.top), self.address)
            return {path.removeprefix(self.top).lstrip("/") for path in found if not path.endswith("/")} - {""}

    @contextmanager
    def _in_a_line(self) -> Iterator[None]:
        try:
            yield
        except damage() as error:
            raise ValueError(
                f"--output_dir is {self.address}; it cannot be written ({one_line(error)}). Check the address, the credentials and "
                "the connection: the same command goes on with what is missing."
            ) from error
