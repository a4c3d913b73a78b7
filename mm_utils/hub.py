"""Push a run's model, or a prepared data set, to the Hugging Face Hub; a push that fails is a warning."""

import logging
import os
import re
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers import TrainerControl, TrainerState

from mm_utils.arguments import Parsed, arg
from mm_utils.checkpointing.files import CONFIG_FILE, checkpoint_folders, checkpoint_path, size_of
from mm_utils.text import one_line
from mm_utils.training.callbacks import RunCallback

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
_START_TIMEOUT = 30.0  # seconds that the start of training waits for the Hub
_TIMEOUT = 600.0  # seconds that the end waits, and as long as the bytes take at 1 MB/s
# Files about this machine and its paths; the card has the settings, the command and the versions.
_OF_MACHINE = (CONFIG_FILE, "environment.json", "skipped_images.jsonl", "nonfinite_steps.jsonl")
_UNFINISHED = ("checkpoint-*/*", ".*", "*/.*", "*.tmp", "*__pycache__*")
# Files that resume a run and are not a part of a model.
_RESUME_STATE = (
    *("optimizer*", "scheduler*", "scaler*", "random_states*", "ema.safetensors", "adapters.safetensors"),
    *("trainer_state.json", "run.json", "manifest.json"),
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
        "last-checkpoint; all_checkpoints: and every checkpoint under its own name.",
        choices=list(STRATEGIES),
        decides="report",
    )

    def __post_init__(self) -> None:
        if self.hub_strategy not in STRATEGIES:
            raise ValueError(f"--hub_strategy is {self.hub_strategy!r}; unknown. Choose from {', '.join(STRATEGIES)}.")
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
        check_repository("--hub_dataset_id", self.hub_dataset_id, self.license)

    def repository(self, folder: str) -> str:
        """Return the name of the repository for a folder."""
        return self.hub_dataset_id or repository_name(Path(folder))


def check_repository(flag: str, name: str | None, licence: str | None = None) -> None:
    """Raise ValueError unless the Hub could have a repository of this name and `--license`."""
    try:
        if name is not None:
            validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"{flag} is {name!r}; {one_line(error)} Give 'name' or 'namespace/name'.") from error
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        raise ValueError(
            f"--license is {licence!r}; the Hub's identifiers have small letters, digits, dots and hyphens. Give one of "
            "https://hf.co/docs/hub/repositories-licenses, such as apache-2.0 or cc-by-4.0, or other."
        )


def repository_name(output_dir: Path) -> str:
    """Return the folder's name without characters that the Hub refuses."""
    name = re.sub(r"[^A-Za-z0-9_.]+|\.\.+|--+", "-", output_dir.resolve().name.removesuffix(".git"))
    return name[:96].strip("-.") or "model"


class Repository:
    """A repository of the Hub, to which folders are pushed in the background, one after the other.

    Attributes:
        name: with its namespace once the repository is created.
        kind: `model` or `dataset`.
        private: whether it is created as private.
    """

    def __init__(self, name: str, kind: str, private: bool = False):
        self.name, self.kind, self.private = name, kind, private
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None)
        self._lock = threading.Lock()
        disable_progress_bars()

    def push(self, folder: Path | None = None, **options: Any) -> Future[str | None]:
        """Create the repository and push a folder; the future has the reason of a failure, or None.

        `options` are those of `HfApi.upload_folder`.
        """
        # Not by `run_as_future`, whose thread keeps a finished process for as long as the Hub does not answer.
        push: Future[str | None] = Future()

        def run() -> None:
            with self._lock:
                try:
                    # None, not False: an organisation whose default is private keeps it.
                    private = self.private or None
                    url = self.api.create_repo(self.name, private=private, exist_ok=True, repo_type=self.kind)
                    self.name = url.repo_id
                    if folder is not None:
                        self.api.upload_folder(repo_id=self.name, folder_path=folder, repo_type=self.kind, **options)
                    push.set_result(None)
                except Exception as error:  # the run goes on, whatever the client raises
                    push.set_result(one_line(error))

        threading.Thread(target=run, daemon=True).start()
        return push

    def has_got(self, folder: Path, left_out: Sequence[str], message: str) -> bool:
        """Push a folder and wait; return whether it is on the Hub. A failure is a warning, with the command for later."""
        error = _outcome(
            self.push(folder, commit_message=message, ignore_patterns=list(left_out)), _TIMEOUT + size_of(folder) / 1e6
        )
        if error:
            kind = [] if self.kind == "model" else ["--repo-type", self.kind]
            words = ["hf", "upload", self.name, str(folder), ".", *kind, *["--private"] * self.private]
            words += [word for name in left_out for word in ("--exclude", name)]
            text = "the push to %s failed; %s. It is safe in %s; push it later with: %s"
            logger.warning(text, self.name, error, folder, shlex.join(words))
        return not error


def _outcome(push: Future[str | None], timeout: float) -> str | None:
    try:
        return push.result(timeout)
    except TimeoutError:
        return f"it is not done within {timeout:.0f} seconds"


class HubPusher(RunCallback):
    """Push at saves and at the end as `--hub_strategy` says, on the main process."""

    arguments = HubArguments
    flag = "push_to_hub"
    reads = "hub_model_id hub_strategy"

    def __init__(self, args: HubArguments):
        self.args = args
        self._pushes: dict[Future[str | None], Path] = {}

    @classmethod
    def attach(cls, given: Parsed) -> "HubPusher":
        """Return the callback with --push_to_hub."""
        return cls(given[HubArguments])

    def on_start(self, run: Any) -> None:
        """Push the run's folder."""
        self.open(run.run.output_dir)

    def open(self, output_dir: Path) -> None:
        """Set the folder that is pushed."""
        self.output_dir = output_dir.absolute()
        self.repository = Repository(self.args.hub_model_id or repository_name(self.output_dir), "model")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Create the repository, so that a bad token shows before the training."""
        if state.is_world_process_zero and (error := _outcome(self.repository.push(), _START_TIMEOUT)):
            text = "the Hub repository is %s; it cannot be opened: %s. Training goes on and the push is tried again later; "
            logger.warning(text + "check `hf auth whoami`", self.repository.name, error)

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, checkpoint: Path | None = None, **kwargs: Any
    ) -> None:
        """Push `checkpoint` in the background, unless the push before it is still in progress."""
        if state.is_world_process_zero and self.args.hub_strategy != "end" and self._settle():
            checkpoint = checkpoint or checkpoint_path(args.output_dir, state.global_step)
            self._push(checkpoint, commit_message=checkpoint.name, ignore_patterns=list(_RESUME_STATE))
            self._push_state(checkpoint)

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
        for checkpoint in checkpoint_folders(self.output_dir)[-1:]:
            self._push_state(checkpoint)
        self._settle(_TIMEOUT)
        return self.repository.has_got(
            self.output_dir, (*_UNFINISHED, *_OF_MACHINE, *_RESUME_STATE), "End of training"
        )

    def _push(self, checkpoint: Path, **options: Any) -> None:
        self._pushes[self.repository.push(checkpoint, **options)] = checkpoint

    def _push_state(self, checkpoint: Path) -> None:
        """Push all of a checkpoint, if `--hub_strategy` asks for it, in the place of what it replaces."""
        places = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}
        if place := places.get(self.args.hub_strategy):
            message = f"{checkpoint.name}, to resume"
            self._push(checkpoint, path_in_repo=place, commit_message=message, delete_patterns="*")

    def _settle(self, timeout: float = 0.0) -> bool:
        """Name the pushes of checkpoints that failed; return whether all are done, at most `timeout` seconds later."""
        _, waiting = wait(self._pushes, timeout)
        for push in self._pushes.keys() - waiting:
            checkpoint = self._pushes.pop(push)
            if error := push.result():
                logger.warning("the push of %s to %s failed: %s", checkpoint.name, self.repository.name, error)
        return not waiting


def push_data_set(folder: str, args: DatasetHubArguments) -> bool:
    """Push a prepared folder; return whether it is on the Hub. A failure is a warning."""
    if not args.push_to_hub:
        return False
    repository = Repository(args.repository(folder), "dataset", args.hub_private_repo)
    logger.info("Pushing %s to %s, %s", folder, repository.name, "private" if repository.private else "public")
    if is_there := repository.has_got(Path(folder), _SET_ASIDE, "Prepared data set"):
        logger.info("Pushed to %s: load_dataset(%r)", repository.name, repository.name)
    return is_there
