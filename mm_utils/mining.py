"""Find an image's hard negatives: captions of others that the towers rank high.

Of the captions that are most similar to an image, those are left out that may be true of it (docs/data.md#mine-hard-negatives). The margin is
that of `mine_hard_negatives` of sentence-transformers, after NV-Retriever (arXiv 2407.15831).

Shape letters: M images, T captions, K candidates of an image, N rows.
"""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils import distributed
from mm_utils.data.arguments import MiningArguments
from mm_utils.data.images import open_image
from mm_utils.data.prepare.on_disk import write_splits
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, fingerprint, groups, near_pairs
from mm_utils.data.rows.columns import NEGATIVES
from mm_utils.evaluation.embeddings import Embeddings, top_candidates
from mm_utils.files import atomic_folder
from mm_utils.model.reading import UnreadableError

logger = logging.getLogger(__name__)

REASONS = ("same_text", "same_image", "too_close")
REPORT = "negatives.json"
_KEPT, _PASSED = -1, -2  # what may be taken; own captions, and what is beyond the candidates


@dataclass
class Mined:
    """The negatives of all rows, the most similar first, and how many candidates were left out, by reason."""

    negatives: list[list[str]]
    left_out: dict[str, int]


def choose(split: Embeddings, rows: datasets.Dataset, group_N: np.ndarray, args: MiningArguments) -> Mined:
    """Choose negatives among all captions of a split, given the group of pictures of each row."""
    rows_M, device = split.rows_M.tolist(), split.text_TE.device
    words = rows.select_columns(["captions", "caption_keys"])[rows_M]
    # An image's side by side, as they were embedded
    texts = [text for captions in words["captions"] for text in captions]
    count_M = torch.tensor([len(captions) for captions in words["captions"]], device=device)
    owner_T = torch.arange(len(rows_M), device=device).repeat_interleave(count_M)
    key_T = torch.tensor([key for keys in words["caption_keys"] for key in keys], device=device)
    text_T = key_T.unique(return_inverse=True)[1]
    most = args.num_candidates + int(count_M.max())
    cosine_MK, caption_MK = top_candidates(*split.directions["image_to_text"], most)
    own_T = (split.image_ME[owner_T] * split.text_TE).sum(1)
    best_M = own_T.new_full((len(rows_M),), -math.inf).scatter_reduce(0, owner_T, own_T, "amax")
    owner_MK, image_M1 = owner_T[caption_MK], torch.arange(len(rows_M), device=device)[:, None]
    group_M = torch.from_numpy(group_N).to(device)[split.rows_M]
    is_own_text_MK = torch.isin(image_M1 * len(texts) + text_T[caption_MK], owner_T * len(texts) + text_T)
    # Later ones win, so that each candidate is counted once.
    fate_MK = torch.full_like(caption_MK, _KEPT)
    fate_MK[cosine_MK > (1 - args.relative_margin) * best_M[:, None]] = REASONS.index("too_close")
    fate_MK[group_M[owner_MK] == group_M[:, None]] = REASONS.index("same_image")
    fate_MK[is_own_text_MK] = REASONS.index("same_text")
    fate_MK[owner_MK == image_M1] = _PASSED
    others_MK = fate_MK != _PASSED
    fate_MK[others_MK & (others_MK.cumsum(1) > args.num_candidates)] = _PASSED
    mined = Mined([[]] * len(rows), {name: int((fate_MK == at).sum()) for at, name in enumerate(REASONS)})
    keys = key_T.tolist()
    for row, kept_K, caption_K in zip(rows_M, (fate_MK == _KEPT).tolist(), caption_MK.tolist(), strict=True):
        taken: dict[int, str] = {}  # each text once
        for caption in (caption for caption, kept in zip(caption_K, kept_K, strict=True) if kept):
            taken.setdefault(keys[caption], texts[caption])
        mined.negatives[row] = list(taken.values())[: args.num_negatives]
    return mined


def same_pictures(rows: datasets.Dataset, accelerator: Accelerator) -> np.ndarray:
    """Return each row's group of equal pictures, named by its first; unreadable ones alone."""
    world = accelerator.num_processes
    parts, prints = [distributed.share(len(rows), part, world) for part in range(world)], []
    images = rows.select_columns(["image"])
    for row in parts[accelerator.process_index]:
        try:
            prints.append(fingerprint(open_image(images[row]["image"], 256)))
        except UnreadableError:
            prints.append(bytes(FINGERPRINT.itemsize))  # as a flat image, which resembles none
    mine = torch.tensor(np.frombuffer(b"".join(prints), np.uint8)).view(-1, FINGERPRINT.itemsize)
    everyone: Tensor = distributed.gather(mine.to(accelerator.device), [len(part) for part in parts])
    return groups(len(rows), near_pairs(everyone.cpu().numpy().view(FINGERPRINT)[:, 0]))


def write_mined(
    pairs: datasets.DatasetDict, mined: Mined, source: str, folder: Path, settings: dict[str, Any]
) -> None:
    """Write the prepared set of `source` again, `train` with its negatives, and `negatives.json`; called on the main process."""
    counts = [len(texts) for texts in mined.negatives]
    said: dict[str, Any] = {"images": len(counts), "negatives": sum(counts), "images_without": counts.count(0)}
    said |= {"left_out": mined.left_out, "settings": settings}
    tables = {}
    for split, rows in pairs.items():
        rows = rows.remove_columns({NEGATIVES} & {*rows.column_names})
        negatives = mined.negatives if split == "train" else [[]] * len(rows)
        column = datasets.List(datasets.Value("string"))
        tables[split] = rows.add_column(NEGATIVES, negatives, feature=column).with_format("arrow").iter(1000)
    with atomic_folder(folder, "--output_dir") as work:
        write_splits(tables, work)
        report = json.loads(Path(source, "report.json").read_text(encoding="utf-8"))
        report["mined_from"] = source
        for name, content in (("report.json", report), (REPORT, said)):
            (work / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    logger.info(
        "%s: %s negatives for %s images; left out %s", folder, f"{sum(counts):,}", f"{len(counts):,}", mined.left_out
    )
