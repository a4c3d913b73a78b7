"""Push a run's model, or a prepared data set, to the Hugging Face Hub; a push that fails is a warning."""

import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers import TrainerControl, TrainerState

from mm_utils.arguments import Parsed, arg
from mm_utils.checkpointing.files import CONFIG_FILE, SUMS_FILE, checkpoint_folders, size_of
from mm_utils.text import one_line
from mm_utils.training.callbacks import RunCallback

logger = logging.getLogger(__name__)

# Seconds that start and end wait for the Hub; the end, also as long as 1 MB/s takes
_START_TIMEOUT, _TIMEOUT = 30.0, 600.0
# Files that resume a run and are not a part of a model.
_RESUME_STATE = (
    *("optimizer*", "scheduler*", "scaler*", "random_states*", "ema.safetensors", "adapters.safetensors"),
    *("trainer_state.json", "run.json"),
)
_NO_MODEL = (
    *("checkpoint-*/*", ".*", "*/.*", "*.tmp", "*__pycache__*", *_RESUME_STATE),
    # About this machine and its paths; the card has the settings, the command and the versions.
    *(CONFIG_FILE, "environment.json", "skipped_images.jsonl", "nonfinite_steps.jsonl"),
)
# What was set aside stays here: it may be what nobody should have, and it names paths of this machine.
_SET_ASIDE = ("quarantine.jsonl", ".*")


@dataclass
class HubArguments:
    """Flags for pushing. The token comes from `hf auth login` or HF_TOKEN and is never a flag."""

    push_to_hub: bool = arg(False, "Push the model to the Hugging Face Hub.", decides="report", usual=True)
    hub_model_id: str | None = arg(
        None, "Repository: 'name' or 'namespace/name'; by default output_dir's name.", decides="place"
    )
    hub_strategy: str = arg(
        "end",
        "end: push once, at the end; every_save: the model at every save; checkpoint: and the newest checkpoint as "
        "last-checkpoint.",
        choices=["end", "every_save", "checkpoint"],
        decides="report",
    )

    def __post_init__(self) -> None:
        check_repository("--hub_model_id", self.hub_model_id)


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
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise ValueError(
                f"--license is {self.license!r}; the Hub's identifiers have small letters, digits, dots and hyphens. Give one of "
                "https://hf.co/docs/hub/repositories-licenses, such as apache-2.0 or cc-by-4.0, or other."
            )

    def repository(self, folder: str) -> str:
        """Return the name of the repository for a folder."""
        return self.hub_dataset_id or repository_name(Path(folder))


def check_repository(flag: str, name: str | None) -> None:
    """Raise ValueError unless the Hub could have a repository of this name."""
    try:
        if name is not None:
            validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"{flag} is {name!r}; {one_line(error)} Give 'name' or 'namespace/name'.") from error


def repository_name(output_dir: Path) -> str:
    """Return the folder's name without characters that the Hub refuses."""
    name = re.sub(r"[^A-Za-z0-9_.]+|\.\.+|--+", "-", output_dir.resolve().name.removesuffix(".git"))
    return name[:96].strip("-.") or "model"


class Repository:
    """A repository of the Hub, to which folders are pushed in the background, one after the other.

    `name` has its namespace once the repository is created; `kind` is `model` or `dataset`.
    """

    def __init__(self, name: str, kind: str, private: bool = False):
        self.name, self.kind, self.private = name, kind, private
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None)
        disable_progress_bars()

    def push(self, *uploads: Mapping[str, Any]) -> Future[None]:
        """Create the repository, and push folders by arguments of `HfApi.upload_folder`."""

        def work() -> None:
            # None, not False: an organisation whose default is private keeps it.
            made = self.api.create_repo(self.name, private=self.private or None, exist_ok=True, repo_type=self.kind)
            self.name = made.repo_id
            for upload in uploads:
                self.api.upload_folder(repo_id=self.name, repo_type=self.kind, **upload)

        return self.api.run_as_future(work)

    def has_got(self, folder: Path, left_out: Sequence[str], message: str) -> bool:
        """Push a folder and wait; return whether it is on the Hub. A failure is a warning, with the command for later."""
        push = self.push({"folder_path": folder, "commit_message": message, "ignore_patterns": list(left_out)})
        error = _failure(push, _TIMEOUT + size_of(folder) / 1e6)
        if error:
            kind = [] if self.kind == "model" else ["--repo-type", self.kind]
            words = ["hf", "upload", self.name, str(folder), ".", *kind, *["--private"] * self.private]
            words += [word for name in left_out for word in ("--exclude", name)]
            text = "the push to %s failed; %s. It is safe in %s; push it later with: %s"
            logger.warning(text, self.name, error, folder, shlex.join(words))
        return not error


def _failure(push: Future[None], timeout: float) -> str:
    """Return why a push has failed, or "": whatever the client raises, the run goes on."""
    try:
        push.result(timeout)
        return ""
    except TimeoutError:
        return f"it is not done within {timeout:.0f} seconds"
    except Exception as error:
        return one_line(error)


class HubPusher(RunCallback):
    """Push at saves and at the end as `--hub_strategy` says, on the main process."""

    arguments = HubArguments
    flag = "push_to_hub"
    reads = "hub_model_id hub_strategy"

    def __init__(self, args: HubArguments):
        self.args, self.pushed = args, ""
        self.push: Future[None] | None = None  # of the checkpoint `pushed`

    @classmethod
    def attach(cls, given: Parsed) -> "HubPusher":
        """Return the callback with --push_to_hub."""
        return cls(given[HubArguments])

    def on_start(self, run: Any) -> None:
        """Name the repository of the run's folder."""
        self.output_dir = run.run.output_dir.absolute()
        self.repository = Repository(self.args.hub_model_id or repository_name(self.output_dir), "model")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Create the repository, so that a bad token shows before the training."""
        if state.is_world_process_zero and (error := _failure(self.repository.push(), _START_TIMEOUT)):
            text = "the Hub repository is %s; it cannot be opened: %s. Training goes on and the push is tried again later; "
            logger.warning(text + "check `hf auth whoami`", self.repository.name, error)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Push the checkpoint in the background, unless the push before it is still in progress."""
        checkpoint: Path = kwargs["checkpoint"]
        is_free = self.push is None or self.push.done()
        if state.is_world_process_zero and self.args.hub_strategy != "end" and is_free:
            self.settle()
            model = {"commit_message": checkpoint.name, "ignore_patterns": [*_RESUME_STATE, SUMS_FILE]}
            self._push(checkpoint, {"folder_path": checkpoint, **model})

    def on_finish(self, run: Any) -> None:
        """Set the card's repository, whose namespace is known by now."""
        run.run.repository = self.repository.name

    def on_publish(self, run: Any) -> None:
        """Push the model. The process group ends first: other ranks would wait for the Hub in a collective."""
        run.run.accelerator.wait_for_everyone()
        run.run.accelerator.end_training()
        if run.run.accelerator.is_main_process and self.push_model():
            run.published.append(f"pushed to {self.repository.name}")

    def push_model(self) -> bool:
        """Push the last checkpoint, and the output folder as the final model; return whether the model is on the Hub."""
        self.settle()
        for checkpoint in checkpoint_folders(self.output_dir)[-1:]:
            self._push(checkpoint)
        self.settle()
        return self.repository.has_got(self.output_dir, _NO_MODEL, "End of training")

    def _push(self, checkpoint: Path, *uploads: Mapping[str, Any]) -> None:
        """Push, and with `--hub_strategy checkpoint` all of the checkpoint in the place of the one before, to resume."""
        state = {"path_in_repo": "last-checkpoint", "commit_message": f"{checkpoint.name}, to resume"}
        if self.args.hub_strategy == "checkpoint":
            uploads = (*uploads, {"folder_path": checkpoint, **state, "delete_patterns": "*"})
        if uploads:
            self.push, self.pushed = self.repository.push(*uploads), checkpoint.name

    def settle(self) -> None:
        """Wait for the push of a checkpoint, and name one that failed."""
        if self.push is not None and (error := _failure(self.push, _TIMEOUT)):
            logger.warning("the push of %s to %s failed: %s", self.pushed, self.repository.name, error)
        self.push = None


def push_data_set(folder: str, args: DatasetHubArguments) -> bool:
    """Push a prepared folder; return whether it is on the Hub. A failure is a warning."""
    if not args.push_to_hub:
        return False
    repository = Repository(args.repository(folder), "dataset", args.hub_private_repo)
    logger.info("Pushing %s to %s, %s", folder, repository.name, "private" if repository.private else "public")
    if is_there := repository.has_got(Path(folder), _SET_ASIDE, "Prepared data set"):
        logger.info("Pushed to %s: load_dataset(%r)", repository.name, repository.name)
    return is_there
