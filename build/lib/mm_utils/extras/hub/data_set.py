"""Push a prepared data set to the Hub."""

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path

from mm_utils.arguments import arg
from mm_utils.checkpointing.files import size_of
from mm_utils.extras.hub.pusher import check_license, check_repository, repository_name
from mm_utils.extras.hub.upload import RETRY_DELAYS, upload_apart, upload_limit

logger = logging.getLogger(__name__)

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
