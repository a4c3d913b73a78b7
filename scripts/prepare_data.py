"""Turn raw sources of images and captions into one verified pair data set, and a report on what was found.

A file with one image and its caption, or captions, a row; what was found is in data/mine/report.md:
    python scripts/prepare_data.py --sources pairs.jsonl --output_dir data/mine --test_fraction 0.1

Several sources of any kind:
    python scripts/prepare_data.py --output_dir data/mixed --sources \\
        coco/captions_train2017.json,image_root=coco/train2017 "shards/web-{000000..000099}.tar"

A table with columns of other names, its first thousand rows, to try:
    python scripts/prepare_data.py --sources photos.csv,image_column=Bild,caption_column=Text --output_dir data/try --max_rows 1000

A table that grows: prepared anew, and images that the data set knows stay in their splits:
    python scripts/prepare_data.py --sources pairs.jsonl --output_dir data/mine --test_fraction 0.1 --overwrite

An interrupted run continues where it stopped when the same command is given again.
"""

import logging
import time
from pathlib import Path

from mm_utils.arguments import parse_args, parse_first
from mm_utils.data.arguments import PathArguments
from mm_utils.data.prepare.arguments import CheckArguments, PrepareArguments, ReconcileArguments, TimedArguments

FLAGS = (PrepareArguments, CheckArguments, TimedArguments, ReconcileArguments, PathArguments)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from mm_utils.data.prepare.dedup_and_split import check_kept, reconcile
from mm_utils.data.prepare.ingest import Pool, ingest_sources, local_pool
from mm_utils.data.prepare.on_disk import earlier_rows, write_findings, write_pairs
from mm_utils.data.prepare.report import describe, summarize, write_data_card, write_report
from mm_utils.data.prepare.workspace import parse_source, plan_of, workspace
from mm_utils.run.script import run_script, set_up_logging

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None, pool: Pool = local_pool) -> dict[str, float]:
    """Run the script and return how many images and rows there are; `argv` lets tests and notebooks call it.

    Args:
        pool: makes what does the work; default: the cores of this machine.
    """
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(*FLAGS, argv=argv, doc=__doc__)
    args = given[PrepareArguments]
    checks = given[CheckArguments]
    timed = given[TimedArguments]
    reconcile_args = given[ReconcileArguments]
    set_up_logging()

    start = time.perf_counter()
    with workspace(args) as work:
        earlier = earlier_rows(args.output_dir)  # none, unless --overwrite allows some

        # 2. Rows alone: read, check, shrink, on all cores; what an earlier run has done is kept.
        sources = [parse_source(item, given[PathArguments]) for item in args.sources]
        ingested = ingest_sources(sources, plan_of(args, checks, timed, pool), work)

        # 3. Rows together: duplicates, leaks, splits.
        found = reconcile(ingested.parts, reconcile_args, work / "leaks.jsonl", earlier=earlier)
        check_kept(ingested, found, args.max_bad_fraction)

        # 4. Write the data set and the report.
        pairs = write_pairs(found, ingested.parts, work / "result")
        summary = summarize(args, given.settings, ingested, found, pairs, earlier)
        summary["seconds"] = round(time.perf_counter() - start, 1)
        write_findings(work / "result", summary, ingested.faults + found.faults)
        write_report(work / "result", pairs, summary)
        write_data_card(work / "result", Path(args.output_dir).resolve().name, pairs, summary)

    logger.info("%s", describe(summary, args.output_dir))
    return {f"{name}_images": float(len(rows)) for name, rows in pairs.items()}


if __name__ == "__main__":
    run_script(main, "What was read is kept beside --output_dir, in .partial; the same command goes on there.")
