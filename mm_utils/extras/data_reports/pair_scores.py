"""How well captions fit their images, by a model: a score of every pair, the worst of them, and what is set aside.

A pair has a cosine, and `closer`, the share of other images that are closer to its caption: 0 is the best, and 0.5 is chance. The
cosine depends on the model and on how common a caption is; the share hardly does, so the worst pairs are found by it. Beyond
`REFERENCE` images, the share is one of a sample of these, so that the work grows with the pairs alone.

Shape letters: M images, T captions, R images of the sample, E embedding width, b a block of captions.
"""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor

from mm_utils.arguments import arg
from mm_utils.data.prepare.dedup_and_split import Reconciled, row_fault
from mm_utils.data.prepare.on_disk import write_pairs
from mm_utils.extras.data_reports.pictures import Tile, draw_contact_sheet, row_tile

logger = logging.getLogger(__name__)

FILE, SHEET = "pair_scores.jsonl", "worst_pairs.jpg"
REFERENCE = 10_000  # images that a caption is compared with
_BLOCK = 2048  # captions
_SHOWN = 50


@dataclass
class ScoreArguments:
    """Scores of pairs by a model, to find captions that are not of their image."""

    score_with: str | None = arg(
        None,
        "Score every pair with this model: a run's folder, a checkpoint, or a Hub id. pair_scores.jsonl has all, and the report "
        "shows the fifty worst. Best is a model that has not been trained on these pairs.",
    )
    min_pair_score: float | None = arg(
        None, "Set images aside of which no caption has at least this cosine by --score_with."
    )

    def __post_init__(self) -> None:
        if self.min_pair_score is not None and self.score_with is None:
            raise ValueError(
                f"--min_pair_score is {self.min_pair_score}; there are no scores. Give --score_with a model, or drop it."
            )
        if self.min_pair_score is not None and not -1 <= self.min_pair_score <= 1:
            raise ValueError(f"--min_pair_score is {self.min_pair_score}; give a cosine, from -1 to 1.")


@dataclass
class PairScore:
    """One caption of one row of a split."""

    row: int
    caption: int
    cosine: float
    closer: float


def compare(image_ME: Tensor, text_TE: Tensor, owner_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine of each caption with its image and the share of other images closer to it, both `[T]`.

    Args:
        image_ME, text_TE: unit embeddings.
        owner_T: place of each caption's image.
    """
    cosine_T = (image_ME[owner_T] * text_TE).sum(1)
    sample_R = torch.linspace(0, len(image_ME) - 1, min(len(image_ME), REFERENCE), dtype=torch.float64).long()
    sample_R = sample_R.to(owner_T.device)
    shares = []
    for text_bE, own_b, owner_b in zip(
        text_TE.split(_BLOCK), cosine_T.split(_BLOCK), owner_T.split(_BLOCK), strict=True
    ):
        other_bR = owner_b[:, None] != sample_R
        closer_bR = (text_bE @ image_ME[sample_R].T >= own_b[:, None]) & other_bR
        shares.append(closer_bR.sum(1) / other_bR.sum(1).clamp_min(1))
    return cosine_T, torch.cat(shares)


def score_splits(pairs: DatasetDict, model_name: str) -> dict[str, list[PairScore]]:
    """Embed all splits; return the scores of each, in the order of its rows.

    Raises:
        ValueError: if the model cannot be loaded, or reads another medium.
    """
    from mm_utils.data.batches.loaders import LoaderArguments, make_loaders
    from mm_utils.data.batches.tokens import tokenize_captions
    from mm_utils.evaluation.embeddings import embed_split
    from mm_utils.model.build import load_model
    from mm_utils.model.processor import load_processor_of
    from mm_utils.run.start import make_accelerator

    accelerator, processor = make_accelerator(), load_processor_of(model_name)
    loader_args = LoaderArguments()
    loaders = make_loaders(loader_args, accelerator.device, processor)
    loaders.check_medium(next(iter(pairs.values())))
    model = load_model(model_name, fusion_layers=0).eval().to(accelerator.device)
    found = {}
    for name, split in pairs.items():
        rows = tokenize_captions(split, processor.tokenizer, loader_args.max_seq_length)
        with torch.no_grad():
            embedded = embed_split(model, loaders.evaluation(rows, 64), accelerator)
        key_M, order = embedded.image_key_M.sort()
        owner_T = order[torch.searchsorted(key_M, embedded.caption_key_T)]
        cosine_T, closer_T = compare(embedded.image_ME, embedded.text_TE, owner_T)
        columns = (embedded.rows_M[owner_T], cosine_T, closer_T)
        scores, captions = [], dict[int, int]()
        for row, cosine, closer in zip(*(column.tolist() for column in columns), strict=True):
            captions[row] = captions.get(row, -1) + 1
            scores.append(PairScore(row, captions[row], cosine, closer))
        found[name] = sorted(scores, key=lambda score: (score.row, score.caption))
    return found


def set_aside(found: Reconciled, scores: dict[str, list[PairScore]], least: float) -> dict[str, list[PairScore]]:
    """Take rows out of `found` of which no caption reaches the `least` cosine; return the scores of those kept.

    Raises:
        ValueError: if no row is left.
    """
    kept_scores = {}
    for name, of_split in scores.items():
        best: dict[int, float] = {}
        for score in of_split:
            best[score.row] = max(score.cosine, best.get(score.row, -1.0))
        rows, low = found.rows[name], {row: cosine for row, cosine in best.items() if cosine < least}
        for row, cosine in low.items():
            detail = f"the best cosine of a caption is {cosine:.3f}, below {least:g}"
            found.faults.append(row_fault(found.facts, int(rows[row]), "low_pair_score", detail))
        kept = [row for row in range(len(rows)) if row not in low]
        place = {row: at for at, row in enumerate(kept)}
        found.rows[name] = rows[np.array(kept, dtype=int)]
        kept_scores[name] = [
            PairScore(place[score.row], score.caption, score.cosine, score.closer)
            for score in of_split
            if score.row in place
        ]
    found.rows = {name: rows for name, rows in found.rows.items() if len(rows)}
    if not found.rows:
        raise ValueError(
            f"--min_pair_score is {least:g}; no pair reaches it. Lower it; the scores were of --score_with."
        )
    return {name: kept_scores[name] for name in found.rows}


def score_and_set_aside(
    args: ScoreArguments, pairs: DatasetDict, found: Reconciled, parts: list[Path], folder: Path
) -> tuple[DatasetDict, dict[str, list[PairScore]]]:
    """Score the pairs in `folder`, and write those that are kept anew if any is set aside; return both."""
    scores, before = score_splits(pairs, str(args.score_with)), sum(map(len, found.rows.values()))
    if args.min_pair_score is not None:
        scores = set_aside(found, scores, args.min_pair_score)
        if sum(map(len, found.rows.values())) < before:
            shutil.rmtree(folder)
            folder.mkdir()
            pairs = write_pairs(found, parts, folder)
    return pairs, scores


def write_scores(folder: Path, pairs: DatasetDict, scores: dict[str, list[PairScore]], model_name: str) -> None:
    """Write all scores, draw the worst pairs, and add a section to `report.md`."""
    with (folder / FILE).open("w", encoding="utf-8") as file:
        for name, of_split in scores.items():
            ids = pairs[name].with_format(None)["id"]
            for score in of_split:
                line: dict[str, Any] = {"split": name, "id": str(ids[score.row]), "caption": score.caption}
                line |= {"cosine": round(score.cosine, 4), "closer": round(score.closer, 4)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    worst = sorted(
        ((score, pairs[name]) for name, of_split in scores.items() for score in of_split),
        key=lambda each: (-each[0].closer, each[0].cosine),
    )[:_SHOWN]
    draw_contact_sheet([_tile(score, split) for score, split in worst], folder / SHEET, columns=8)
    far = sum(score.closer >= 0.5 for of_split in scores.values() for score in of_split)
    total = sum(map(len, scores.values()))
    with (folder / "report.md").open("a", encoding="utf-8") as report:
        report.write(
            f"\n## Captions that fit their images least\n\nTo {far:,} of {total:,} captions, "
            f"half of the other images or more are closer than their own, by the model {Path(model_name).name}; of random captions it is "
            "half. "
            f"All are in `{FILE}`; these {len(worst)} are the worst.\n\n![the worst pairs]({SHEET})\n"
        )
    logger.info("Half of the other images or more are closer to %s of %s captions than their own; %s shows the worst", f"{far:,}", f"{total:,}", SHEET)  # fmt: skip


def _tile(score: PairScore, split: Dataset) -> Tile:
    tile = row_tile(split, score.row, f"{100 * score.closer:.0f}% closer, cosine {score.cosine:.2f}")
    captions = [caption for caption in split.with_format(None).select([score.row])["captions"][0] if caption]
    return Tile(tile.image, tile.title, captions[min(score.caption, len(captions) - 1)])
