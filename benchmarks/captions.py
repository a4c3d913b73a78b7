"""Search with and without stored captions: how often a caption that is not stored finds its image.

    python -m benchmarks.captions --model_name_or_path outputs/mine --train_file flickr8k/captions.jsonl

The index of the validation split stores the first caption of each image; its other captions are queries. Each figure is the share of
queries whose image is among the first 1, 5 and 10, with half the width of its 95 % interval over images, by the images alone and
with the captions that are stored. `--share 0.5` stores captions of half of the images, whose queries are then shown apart. Nothing is re-ranked.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
from accelerate import Accelerator

from benchmarks.harness import flags_of, print_table
from mm_utils.data.arguments import DataArguments
from mm_utils.data.media.medium import read_by
from mm_utils.data.pairs import load_pairs
from mm_utils.evaluation.metrics import mean_interval
from mm_utils.model.build import open_model
from mm_utils.search.listing import Listing
from mm_utils.search.searcher import Searcher
from mm_utils.search.updating import Embedder, update_index

CUTS = (1, 5, 10)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="a model that scripts/pretrain.py has trained")
    parser.add_argument("--train_file", required=True, help="pairs, of which the validation split is searched")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the images that have a caption in the index"
    )
    args = parser.parse_args(argv)
    rows = load_pairs(DataArguments(train_file=args.train_file))["validation"].select_columns(
        ["id", "image", "captions"]
    )
    ids = rows["id"][:]
    captions = rows["captions"][:]
    queries = [(row, text) for row, texts in enumerate(captions) for text in texts[1:] if text != texts[0]]
    stored = [texts[:1] if row % 10 < 10 * args.share else [] for row, texts in enumerate(captions)]
    features = datasets.Features({name: rows.features[name] for name in ("image", "captions")})
    listing = Listing(ids, datasets.Dataset.from_dict({"image": rows["image"][:], "captions": stored}, features))
    ranks = dict[str, list[int]](images=[], fused=[])
    with TemporaryDirectory() as work:
        model, processor = open_model(args.model_name_or_path)
        embedder = Embedder(model, read_by(processor), 64, 0)
        update_index(Path(work, "index"), args.model_name_or_path, listing, embedder, Accelerator(cpu=True))
        searcher = Searcher(Path(work, "index"))
        for row, text in queries:
            hits = searcher.search_text(text, len(ids), rerank=False)
            own = next(hit for hit in hits if ids[row] in (hit.id, *hit.copies))
            ranks["fused"].append(own.rank)
            ranks["images"].append(sum(hit.cosine >= own.cosine for hit in hits))  # ties count against it
    right: Any = {name: [torch.tensor(found) <= cut for cut in CUTS] for name, found in ranks.items()}
    group_Q = torch.tensor([row for row, _ in queries])
    table = list[dict[str, Any]]()
    has_Q = torch.tensor([bool(stored[row]) for row, _ in queries])
    kinds = {"all": has_Q | True} if has_Q.all() else {"all": has_Q | True, "with a caption": has_Q, "without": ~has_Q}
    for name, found in right.items():
        for kind, of_kind in kinds.items():
            shares = [mean_interval(each[of_kind], group_Q[of_kind]) for each in found]
            recalls = {f"R@{cut}": f"{mean:.3f} ± {half:.3f}" for cut, (mean, half) in zip(CUTS, shares, strict=True)}
            table.append({"order": name, "queries of": kind, **recalls})
    print_table(table, [f"{len(queries):,} queries, {len(ids):,} images"])
    return table


if __name__ == "__main__":
    main()
