"""The run of `scripts/prepare_data.py`: its sources, its plan, and the folder that it works in.

All work is done in `<output_dir>.partial`, whose result is renamed to `output_dir` at the end; an interrupted run leaves it, and the
same command resumes there.
"""

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mm_utils.cores import available_cores
from mm_utils.data.arguments import PathArguments
from mm_utils.data.paths import is_url
from mm_utils.data.prepare.arguments import CheckArguments, PrepareArguments, TimedArguments
from mm_utils.data.prepare.ingest import IngestPlan, Pool, Storage, local_pool
from mm_utils.data.prepare.on_disk import WRITTEN, is_prepared
from mm_utils.data.rows.columns import close_to
from mm_utils.data.rows.source import Source
from mm_utils.files import flush, replace_folder, restore_folder

logger = logging.getLogger(__name__)


def plan_of(
    args: PrepareArguments, checks: CheckArguments, timed: TimedArguments, pool: Pool = local_pool
) -> IngestPlan:
    """Return the settings of `ingest_sources`; `pool` makes what does the work."""
    storage = Storage(args.store, args.short_side, timed)
    workers = args.num_proc or available_cores()
    return IngestPlan(checks, storage, workers, args.max_bad_fraction, args.max_rows, pool)


def parse_source(item: str, paths: PathArguments | None = None) -> Source:
    r"""Read ``path,key=value,...``; a comma inside a value is written ``\,``, and templates are separated by ``|``.

    Raises:
        ValueError: for an unknown key or an impossible value.
    """
    # 'a\,b.csv,format=csv' -> 'a,b.csv', 'format=csv'
    path, *rest = [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", item)]
    internal = ("path", "title", "labelled", "label_column", "file_split", "only", "paths")
    known = [each.name for each in dataclasses.fields(Source) if each.name not in internal]
    values: dict[str, Any] = {"path": path.strip(), "paths": paths or PathArguments()}
    for part in rest:
        key, equals, value = map(str.strip, part.partition("="))
        if not equals:
            raise ValueError(rf"--sources has {item}; '{key}' is not key=value. Write a comma in a path as '\,'.")
        if key in values:
            raise ValueError(f"--sources has {item}; {key} is given twice. Keep one of them.")
        if key not in known:
            raise ValueError(f"--sources has the key {key}; known are {', '.join(known)}.{close_to(key, known)}")
        values[key] = tuple(value.split("|")) if key == "templates" else value
    source = Source(**values)
    if is_url(source.path):
        raise ValueError(
            f"{source.title}; files of this machine are read. Copy them first, for example with aws s3 sync, or train on shards with "
            "--streaming."
        )
    return source


@contextmanager
def workspace(args: PrepareArguments) -> Iterator[Path]:
    """Yield a folder to work in; its folder `result` takes the place of `args.output_dir`, whose links are followed, at the end.

    Whoever opens a folder that is overwritten finds the old data set or the new one, and nothing else.

    Raises:
        ValueError: if the output folder is taken or cannot be written, or another process is at work there.
    """
    output = Path(args.output_dir).resolve()
    work = output.with_name(f"{output.name}.partial")
    try:
        _refuse_taken(output, args)
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / "lock", blocking=False):
            restore_folder(output)  # of a run that was killed while it replaced it
            _refuse_taken(output, args)  # again, as the last holder of the lock may be done
            shutil.rmtree(work / "result", ignore_errors=True)  # of a run that was killed while writing
            try:
                yield work
            except BaseException:
                if any(path.is_file() and path.name != "lock" for path in work.rglob("*")):
                    logger.warning(
                        "%s keeps the rows that were read: the same command resumes there, or delete it", work
                    )
                else:
                    shutil.rmtree(work, ignore_errors=True)
                raise
            flush(work / "result")
            replace_folder(work / "result", output)
        shutil.rmtree(work)
    except Timeout:
        raise ValueError(f"{work} is in use by another run. Wait for it, or give another folder.") from None
    except OSError as error:
        raise ValueError(
            f"--output_dir is {args.output_dir}; {error.filename or 'it'} cannot be written: {error.strerror}. Free some "
            "space or give another folder; the same command resumes where this stopped."
        ) from error


def _refuse_taken(output: Path, args: PrepareArguments) -> None:
    """Refuse a folder that holds something else than what may be overwritten, and one whose place no other folder can take."""
    name = args.output_dir
    if os.path.ismount(output) or output == Path.cwd():
        kind = "the current folder" if output == Path.cwd() else "a mount point"
        raise ValueError(
            f"--output_dir is {name}; that is {kind}, and the result takes the place of a folder. Give a folder inside it."
        )
    held = {path.name for path in output.iterdir()} if output.exists() else set[str]()
    if not held:
        return
    remedy = "Remove it, or give another folder."
    if not is_prepared(str(output)):
        raise ValueError(f"--output_dir is {name}; it is not empty, and holds no prepared data set. {remedy}")
    if not args.overwrite:
        raise ValueError(f"--output_dir is {name}; it holds a prepared data set. --overwrite replaces it. {remedy}")
    if others := sorted(held - WRITTEN):
        raise ValueError(
            f"--output_dir is {name}; it also holds {others[0]}, which no preparation wrote and --overwrite would remove. Move it away."
        )
