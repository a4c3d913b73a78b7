"""The card of a prepared data set, and its push to the Hub."""

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import DatasetDict, Features
from huggingface_hub import DatasetCardData

from mm_utils.arguments import arg
from mm_utils.checkpointing.files import size_of
from mm_utils.data.batches.tokens import iso_languages
from mm_utils.data.media import COLUMNS, FEATURES, kind_of
from mm_utils.reports.hub import check_license, check_repository, repository_name
from mm_utils.reports.upload import RETRY_DELAYS, upload_apart, upload_limit
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
# What was set aside stays here: it may be what nobody should have, and it names paths of this machine.
_LEFT_OUT = ("quarantine.jsonl", ".*")


@dataclass
class DatasetHubArguments:
    """Flags for pushing the data set; the token is that of `hf auth login` or HF_TOKEN."""

    push_to_hub: bool = arg(False, "Push the prepared data set to the Hugging Face Hub, with its card and its report.")
    hub_dataset_id: str | None = arg(None, "Repository: 'name' or 'namespace/name'; by default output_dir's name.")
    hub_private_repo: bool = arg(
        True,
        "Create the repository as private, as images and captions may belong to others; one that exists keeps its visibility.",
    )
    license: str | None = arg(
        None, "Licence of images and captions, for the card: an identifier of the Hub, such as cc-by-4.0, or other."
    )

    def __post_init__(self) -> None:
        check_repository("--hub_dataset_id", self.hub_dataset_id)
        check_license(self.license)

    def repository(self, folder: str) -> str:
        """Return the name of the repository for a folder."""
        return self.hub_dataset_id or repository_name(Path(folder))


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
    languages = iso_languages(map(str, summary["captions"]["languages"]))
    images, kind = sum(map(len, pairs.values())), kind_of(next(iter(pairs.values())).features)
    files = [{"split": split, "path": f"{split}/*.arrow"} for split in pairs]
    front = DatasetCardData(
        license=license,
        language=languages or None,
        multilinguality=("multilingual" if len(languages) > 1 else "monolingual") if languages else None,
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


def push_data_set(folder: str, args: DatasetHubArguments, timeout: float = 600.0) -> bool:
    """Push a prepared folder; return whether it is on the Hub. A failure is a warning."""
    if not args.push_to_hub:
        return False
    wanted = args.repository(folder)
    logger.info("Pushing %s to %s, %s", folder, wanted, "private" if args.hub_private_repo else "public")
    repository, error = upload_apart(
        upload_limit(size_of(Path(folder)), timeout),
        repo_id=wanted,
        repo_type="dataset",
        private=args.hub_private_repo,
        create=True,
        retry_delays=RETRY_DELAYS,
        folder=folder,
        commit_message="Prepared data set",
        ignore_patterns=list(_LEFT_OUT),
    )
    if error:
        private = " --private" if args.hub_private_repo else ""
        excluded = " ".join(f'--exclude "{name}"' for name in _LEFT_OUT)
        command = f"hf upload {wanted} {shlex.quote(folder)} . --repo-type dataset {excluded}{private}"
        logger.warning(
            "the push to %s failed; %s. It is safe in %s; push it later with: %s", wanted, error, folder, command
        )
        return False
    logger.info("Pushed to %s: load_dataset(%r)", repository, repository)
    return True
