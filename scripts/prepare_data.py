"""Turn raw sources of images and captions into one verified pair data set, and a report on what was found.

A file with one image and its caption, or captions, a row:
    python scripts/prepare_data.py --sources pairs.jsonl --output_dir data/mine

Several sources of any kind: COCO captions and shards, three pairs of the first for one of the second:
    python scripts/prepare_data.py --output_dir data/mixed --sources \\
        coco/captions_train2017.json,image_root=coco/train2017,weight=3  "shards/web-{000000..000099}.tar,weight=1"

A table with columns of other names; two lists, whose lines are key, tab, path and key, tab, caption:
    python scripts/prepare_data.py --output_dir data/mixed --sources photos.csv,image_column=Bild,caption_column=Text
    python scripts/prepare_data.py --output_dir data/lists --sources images.tsv,captions=captions.tsv

A thousand rows of each, to try; the report is in data/try/report.md:
    python scripts/prepare_data.py --sources pairs.jsonl --output_dir data/try --max_rows 1000

Sounds or clips with their captions, 16,000 samples and 4 frames a second of which are kept:
    python scripts/prepare_data.py --sources sounds.jsonl --output_dir data/sounds
    python scripts/prepare_data.py --sources videos.jsonl --output_dir data/clips --clip_fps 4 --max_seconds 30

Train on it, and look later whether a copy is whole:
    accelerate launch scripts/pretrain.py --dataset_name data/mine
    python scripts/prepare_data.py --verify data/mine

Find captions that are not of their image, by a model that was trained on other pairs:
    python scripts/prepare_data.py --sources pairs.jsonl --output_dir data/mine --score_with openai/clip-vit-base-patch32

On the machines of a Ray cluster, with the same result; sources and result are on a drive that all share:
    python scripts/launch_ray.py --num_workers 32 scripts/prepare_data.py --sources "web-{000..999}.tar" --output_dir data/web

From a store to a store; rows are kept in --work_dir meanwhile, by default in the datasets cache:
    python scripts/prepare_data.py --sources "s3://bucket/web-{000..999}.tar" --output_dir s3://bucket/set
    accelerate launch scripts/pretrain.py --streaming --dataset_name s3://bucket/set --max_steps 20000

Push it to a private repository of the Hub, with its report and a card:
    python scripts/prepare_data.py --sources pairs.jsonl --output_dir data/mine --push_to_hub --license cc-by-4.0

An interrupted run continues where it stopped when the same command is given again.
"""

import logging
import time

from mm_utils.arguments import parse_args
from mm_utils.data.paths import is_url
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.dedup_and_split import ReconcileArguments, reconcile
from mm_utils.data.prepare.on_disk import write_findings, write_pairs
from mm_utils.data.prepare.pipeline import ingest_sources
from mm_utils.data.prepare.timed import TimedArguments
from mm_utils.data.rows.source import PathArguments, resolved
from mm_utils.extras.data_reports.card import write_data_card
from mm_utils.extras.data_reports.pair_scores import ScoreArguments, score_and_set_aside, write_scores
from mm_utils.extras.data_reports.preparing import Engine, PrepareArguments, parse_source, verify, workspace
from mm_utils.extras.data_reports.report import removed_examples, write_report
from mm_utils.extras.data_reports.summary import describe, summarize
from mm_utils.extras.hub.data_set import DatasetHubArguments, push_data_set
from mm_utils.extras.streams.fetch import fetched
from mm_utils.run.checks import check_model
from mm_utils.run.start import run_script, set_up_logging

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None, engine: Engine | None = None) -> dict[str, float]:
    """Run the script and return how many images and rows there are; `argv` lets tests and notebooks call it.

    Args:
        engine: what does the work; default: this machine.
    """
    # 1. Arguments: dataclass defaults < --config file < command line.
    groups = (PrepareArguments, CheckArguments, TimedArguments, ReconcileArguments, PathArguments, ScoreArguments)
    given = parse_args(*groups, DatasetHubArguments, argv=argv, doc=__doc__)
    args, checks, timed = given[PrepareArguments], given[CheckArguments], given[TimedArguments]
    reconcile_args, paths, hub_args = given[ReconcileArguments], given[PathArguments], given[DatasetHubArguments]
    scoring = given[ScoreArguments]
    set_up_logging()
    if args.verify:
        rows = verify(args.verify)
        logger.info("%s: all %s rows are what was written", args.verify, f"{rows:,}")
        return {"rows": rows}

    check_model(scoring.score_with, "--score_with")  # before the rows are read
    if hub_args.push_to_hub and is_url(args.output_dir):
        raise ValueError(
            f"--push_to_hub is set; --output_dir is {args.output_dir}, and a folder is pushed. Give a folder."
        )
    start = time.perf_counter()
    with workspace(args) as work:
        # 2. Rows alone: read, check, shrink, on all cores; what an earlier run has done is kept.
        sources = [fetched(resolved(parse_source(item)), work / "fetched") for item in args.sources]
        ingested = ingest_sources(sources, paths, args.plan(checks, timed, engine), work)

        # 3. Rows together: duplicates, leaks, splits.
        search = engine.search if engine else None
        found = reconcile(ingested.parts, reconcile_args, ingested.weights, work / "leaks.jsonl", search=search)

        # 4. Write the data set, score its pairs if a model is given, and write the report.
        pairs, scores = write_pairs(found, ingested.parts, work / "result"), None
        if scoring.score_with:
            pairs, scores = score_and_set_aside(scoring, pairs, found, ingested.parts, work / "result")
        summary = summarize(args, given.settings, ingested, found, pairs)
        summary["seconds"] = round(time.perf_counter() - start, 1)
        write_findings(work / "result", summary, ingested.faults + found.faults)
        write_report(work / "result", pairs, summary, removed_examples(found, ingested.parts))
        if scores is not None:
            write_scores(work / "result", pairs, scores, str(scoring.score_with))
        write_data_card(work / "result", hub_args.repository(args.output_dir), pairs, summary, hub_args.license)

    # 5. Push the folder, which is complete.
    push_data_set(args.output_dir, hub_args)
    logger.info("%s", describe(summary, args.output_dir))
    return {f"{name}_images": float(len(rows)) for name, rows in pairs.items()}


if __name__ == "__main__":
    run_script(main)
