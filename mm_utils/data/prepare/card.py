"""The card of a prepared data set."""

import logging
from pathlib import Path
from typing import Any

from datasets import DatasetDict, Features
from huggingface_hub import DatasetCardData

from mm_utils.data.media import COLUMNS, FEATURES, kind_of
from mm_utils.text import markdown_text, redact

logger = logging.getLogger(__name__)

CARD = "README.md"
_SIZES = {
    10**3: "n<1K",
    10**4: "1K<n<10K",
    10**5: "10K<n<100K",
    10**6: "100K<n<1M",
    10**7: "1M<n<10M",
    10**8: "10M<n<100M",
}
_TASKS = {
    "image": ["image-to-text", "text-to-image", "zero-shot-image-classification"],
    "clip": ["video-classification"],
    "sound": ["audio-classification"],
}


def write_data_card(
    folder: Path, name: str, pairs: DatasetDict, summary: dict[str, Any], license: str | None = None
) -> None:
    """Write a prepared folder's `README.md`: for the Hub, `load_dataset`, and the report.

    Args:
        folder: has `report.md`.
        name: the title.
        pairs: the splits.
        summary: the content of `report.json`.
        license: an identifier of the Hub; None if it is not known.
    """
    images, kind = sum(map(len, pairs.values())), kind_of(next(iter(pairs.values())).features)
    files = [{"split": split, "path": f"{split}/*.arrow"} for split in pairs]
    front = DatasetCardData(
        license=license,
        size_categories=next((size for limit, size in _SIZES.items() if images < limit), "n>100M"),
        task_categories=_TASKS[kind],
        tags=[f"{COLUMNS[kind]}-text-pairs", f"{COLUMNS[kind]}-text-retrieval"],
        configs=[{"config_name": "default", "data_files": files}],
        **_features(pairs, summary),
    )
    terms = f"Licence: {license}." if license else "Licence: not stated. Images and captions belong to their authors."
    report = (folder / "report.md").read_text(encoding="utf-8").partition("\n")[2].strip()
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {markdown_text(redact(name))}",
        f"{kind.capitalize()}s with their captions, checked, and prepared with Tandem: `datasets.load_dataset` opens them. {terms}",
        redact(report),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _features(pairs: DatasetDict, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the columns as `load_dataset` shall read them; a raw store's pixels stay bytes."""
    if summary["storage"]["store"] == "raw":
        return {}
    features = next(iter(pairs.values())).features.copy()
    medium = kind_of(features)
    decoded = Features({COLUMNS[medium] if name == "image" else name: each for name, each in features.items()})
    decoded[COLUMNS[medium]] = type(FEATURES[medium])()
    return {"dataset_info": {"features": decoded._to_yaml_list()}}
