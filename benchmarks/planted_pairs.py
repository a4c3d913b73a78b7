"""How many wrong pairs `prepare_data.py --score_with` finds: captions of some images are exchanged, and the worst are counted.

    python -m benchmarks.planted_pairs --pairs flickr8k/validation.jsonl --image_root flickr8k --model_name_or_path outputs/photos

Chance finds a share of the wrong pairs that is equal to the share that was exchanged.
"""

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from mm_utils.arguments import arg, parse_args, required
from mm_utils.extras.data_reports.pair_scores import FILE
from scripts import prepare_data


@dataclass
class PlantedArguments:
    """The pairs, the model, and how many pairs are made wrong."""

    pairs: str = required("A JSON-lines file of images and captions.")
    image_root: str = required("The folder of its images.")
    model_name_or_path: str = required("The model that scores the pairs.")
    share: float = arg(0.05, "Share of the images whose captions are exchanged.")
    seeds: int = arg(3, "Draws of these images.")


def found(args: PlantedArguments, seed: int, work: Path) -> dict[str, float]:
    """Return the share of the wrong images that are among as many worst ones, by each score."""
    rows = [json.loads(line) for line in Path(args.pairs).read_text(encoding="utf-8").splitlines()]
    name = "captions" if "captions" in rows[0] else "caption"
    wrong = random.Random(seed).sample(range(len(rows)), round(args.share * len(rows)))
    texts = [rows[row][name] for row in wrong]
    for row, text in zip(wrong, texts[1:] + texts[:1], strict=True):
        rows[row][name] = text
    file = work / f"pairs{seed}.jsonl"
    lines = (json.dumps({**row, "id": f"{place:07}"}) + "\n" for place, row in enumerate(rows))
    file.write_text("".join(lines), encoding="utf-8")
    source = f"{file},image_root={args.image_root},id_column=id"
    prepare_data.main(
        ["--sources", source, "--output_dir", str(work / str(seed)), "--score_with", args.model_name_or_path]
    )
    scores: dict[str, list[tuple[float, float]]] = {}
    for line in (work / str(seed) / FILE).read_text(encoding="utf-8").splitlines():
        each = json.loads(line)
        scores.setdefault(each["id"], []).append((each["closer"], -each["cosine"]))
    kept = {f"{row:07}" for row in wrong} & set(scores)
    shares = {}
    for at, title in enumerate(("closer", "cosine")):
        order = sorted(scores, key=lambda key: (-mean(score[at] for score in scores[key]), key))
        shares[title] = len(kept & set(order[: len(kept)])) / len(kept)
    return shares


def main(argv: list[str] | None = None) -> None:
    """Print the shares by score, over all draws."""
    args = parse_args(PlantedArguments, argv=argv, doc=__doc__)[PlantedArguments]
    with tempfile.TemporaryDirectory() as folder:
        runs = [found(args, seed, Path(folder)) for seed in range(args.seeds)]
    for title in runs[0]:
        values = [run[title] for run in runs]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        sys.stdout.write(f"{title}: {mean(values):.2f}{spread} of the wrong images are among the worst\n")
    sys.stdout.write(f"chance: {args.share:.2f}\n")


if __name__ == "__main__":
    main()
