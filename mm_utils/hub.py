"""Push a run's model to the Hugging Face Hub; a push that fails is a warning."""

import logging
import re
import shlex
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import HfApi, hf_hub_download, metadata_load
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils.checkpointing.files import LAST_CHECKPOINT, checkpoint_folders, size_of
from mm_utils.text import one_line, printable
from mm_utils.training.arguments import CONFIG_FILE

logger = logging.getLogger(__name__)

# Seconds that start and end wait for the Hub; the end, also as long as 1 MB/s takes
_START_TIMEOUT = 30.0
_TIMEOUT = 600.0
_NO_MODEL = (
    *("checkpoint-*/*", f"{LAST_CHECKPOINT}/*", ".*", "*/.*", "*.tmp", "*__pycache__*"),
    # About this machine and its paths; the card has the settings, the command and the versions.
    *(CONFIG_FILE, "environment.json", "skipped_images.jsonl", "nonfinite_steps.jsonl"),
)


def repository_name(output_dir: Path) -> str:
    """Return the folder's name without characters that the Hub refuses."""
    # 'my run (2)' -> 'my-run-2-', and below 'my-run-2'
    name = re.sub(r"[^A-Za-z0-9_.]+|\.\.+|--+", "-", output_dir.resolve().name.removesuffix(".git"))
    return name[:96].strip("-.") or "model"


def licence_of(name: str) -> str:
    """Return the licence that a model's card states, `name` a folder or a Hub id; "" if none is stated or the card is not to be had."""
    try:
        card = Path(name, "README.md") if Path(name).is_dir() else hf_hub_download(name, "README.md")
        found = metadata_load(card) or {}
    except Exception:  # of whatever library the Hub's client uses
        return ""
    return printable(str(found.get("license") or ""))[:100]


def _failure(push: Future[None], timeout: float) -> str:
    """Return why a push has failed, or "": whatever the client raises, the run goes on."""
    try:
        push.result(timeout)
        return ""
    except TimeoutError:
        return f"it is not done within {timeout:.0f} seconds"
    except Exception as error:
        return one_line(error)


def check_repository(name: str | None) -> None:
    """Raise ValueError if the Hub refuses the name of a repository."""
    try:
        validate_repo_id(name or "a")
    except HFValidationError as error:
        problem = f"--hub_model_id is {name!r}; {one_line(error)}"
        raise ValueError(f"{problem} Give 'name' or 'namespace/name'.") from error


class HubPusher(TrainerCallback):
    """Push an output folder and, with the strategy `checkpoint`, in the background at saves, on the main process.

    The token comes from `hf auth login` or HF_TOKEN and is never a flag. `repository` has its namespace once it is created.
    """

    def __init__(self, output_dir: Path, repository: str | None, strategy: str):
        self.output_dir = output_dir.absolute()
        self.repository = repository or repository_name(output_dir)
        self.strategy = strategy
        self.pushed = ""
        self.pushing: Future[None] | None = None  # the checkpoint `pushed`
        self.api = HfApi()
        disable_progress_bars()

    def push(self, **upload: Any) -> Future[None]:
        """Create the repository, and push a folder by arguments of `HfApi.upload_folder`, after what is in progress."""

        def work() -> None:
            self.repository = self.api.create_repo(self.repository, exist_ok=True).repo_id
            if upload:
                self.api.upload_folder(repo_id=self.repository, **upload)

        return self.api.run_as_future(work)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Create the repository, so that a bad token shows before the training."""
        if state.is_world_process_zero and (error := _failure(self.push(), _START_TIMEOUT)):
            text = "the Hub repository is %s; it cannot be opened: %s. Training goes on and the push is tried again later; "
            logger.warning(text + "check `hf auth whoami`", self.repository, error)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Push the checkpoint in the background, unless the push before it is still in progress."""
        if state.is_world_process_zero and (self.pushing is None or self.pushing.done()):
            self._push(kwargs["checkpoint"])

    def push_model(self) -> bool:
        """Push the last checkpoint, and the output folder as the final model; return whether the model is on the Hub."""
        for checkpoint in checkpoint_folders(self.output_dir)[-1:]:
            self._push(checkpoint)
        self.settle()
        ignored = list(_NO_MODEL)
        push = self.push(folder_path=self.output_dir, commit_message="End of training", ignore_patterns=ignored)
        error = _failure(push, _TIMEOUT + size_of(self.output_dir) / 1e6)
        if error:
            words = ["hf", "upload", self.repository, str(self.output_dir), "."]
            words += [word for name in _NO_MODEL for word in ("--exclude", name)]
            text = "the push to %s failed; %s. It is safe in %s; push it later with: %s"
            logger.warning(text, self.repository, error, self.output_dir, shlex.join(words))
        return not error

    def _push(self, checkpoint: Path) -> None:
        """With `--hub_strategy checkpoint`, push a checkpoint in the place of the one before, to resume."""
        self.settle()
        if self.strategy == "checkpoint":
            place = {"path_in_repo": LAST_CHECKPOINT, "delete_patterns": "*"}
            message = f"{checkpoint.name}, to resume"
            self.pushing = self.push(folder_path=checkpoint, commit_message=message, **place)
            self.pushed = checkpoint.name

    def settle(self) -> None:
        """Wait for the push of a checkpoint, and name one that failed."""
        if self.pushing is not None and (error := _failure(self.pushing, _TIMEOUT)):
            logger.warning("the push of %s to %s failed: %s", self.pushed, self.repository, error)
        self.pushing = None


def push(hub: HubPusher | None, accelerator: Accelerator) -> None:
    """Push the model of a finished run, if it has a repository; called on all ranks.

    The process group ends first: other ranks would wait for the Hub in a collective.
    """
    if hub is None:
        return
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if accelerator.is_main_process and hub.push_model():
        logger.info("Pushed to %s", hub.repository)
