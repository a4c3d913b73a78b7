"""Give every file of a folder the class that a saved classifier sees in it."""

import csv
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from mm_utils import distributed
from mm_utils.search.listing import Listing, Skip
from mm_utils.search.updating import Embedder, read_share
from mm_utils.text import no_formula

logger = logging.getLogger(__name__)
_NAMED = 10  # files without a class that the log names


@torch.no_grad()
def classify_folder(file: str, listing: Listing, classifier: Embedder, accelerator: Accelerator) -> dict[str, int]:
    """Write a CSV with path, class and probability of each file of a listing; return how many have a class and how many have none.

    Called on all ranks. A file that cannot be read is named in the log, and its class is empty.
    """
    distributed.on_first(lambda: Path(file).parent.mkdir(parents=True, exist_ok=True))
    mine = range(accelerator.process_index, len(listing.ids), accelerator.num_processes)
    model: Any = classifier.model
    rows: list[tuple[str, str, str]] = []
    skipped: list[Skip] = []
    for examples, others in read_share(listing, mine, len(listing.ids), classifier, accelerator, "Classifying"):
        skipped += others
        if not examples:
            continue
        squares = torch.stack([each["square"] for each in examples]).to(model.device)
        with accelerator.autocast():
            logits_bC = model.classify(classifier.medium.features(squares))
        highest = logits_bC.float().softmax(1).max(1)
        for example, share, place in zip(examples, highest.values.tolist(), highest.indices.tolist(), strict=True):
            rows.append((example["id"], model.config.id2label[place], f"{share:.4f}"))
    rows = gather_object(rows)
    skipped = [*listing.skipped, *gather_object(skipped)]

    def write() -> None:
        table = sorted([*rows, *((line["id"], "", "") for line in skipped)])
        with open(file, "w", newline="", encoding="utf-8") as opened:
            writer = csv.writer(opened)
            writer.writerow(("path", "class", "probability"))
            writer.writerows(map(no_formula, row) for row in table)

    distributed.on_first(write)
    for line in skipped[:_NAMED]:
        logger.warning("%s has no class: %s. %s", line["id"], line["detail"], line["remedy"])
    return {"classified": len(rows), "skipped": len(skipped)}
