"""Push a run's model to the Hugging Face Hub without endangering the run.

During training a thread pushes the newest checkpoint, and the loop never waits for it. A push that fails is tried again at the
next save, with the newer checkpoint, and at the end of training. Each push is a process of its own (`mm_utils.extras.hub.upload`)
with a time limit, so that a Hub that never answers cannot hold the run.
"""

import logging
import os
import re
import shlex
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import TrainerControl, TrainerState

from mm_utils.arguments import Parsed, arg
from mm_utils.checkpointing.files import CONFIG_FILE, checkpoint_folders, checkpoint_path, size_of, step_of
from mm_utils.extras.hub.upload import RETRY_DELAYS, upload_apart, upload_limit
from mm_utils.text import one_line
from mm_utils.training.callbacks import RunCallback

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
STAGING = ".hub"  # in the output folder: the repository as the push in progress will leave it
_START_TIMEOUT = 30.0  # seconds that the start of training may wait for the Hub
_HIDDEN = ("*.tmp", ".*", "__pycache__")
# Files about this machine and its paths; the card has the settings, the command and the versions.
_OF_MACHINE = (CONFIG_FILE, "environment.json", "skipped_images.jsonl", "nonfinite_steps.jsonl")
# Files that resume a run and are not a part of a model.
_RESUME_STATE = (
    *("optimizer*", "scheduler*", "scaler*", "random_states*", "ema.safetensors", "adapters.safetensors"),
    *("trainer_state.json", "run.json", "manifest.json"),
)


@dataclass
class HubArguments:
    """Flags for pushing. The token comes from `hf auth login` or HF_TOKEN and is never a flag."""

    push_to_hub: bool = arg(False, "Push the model to the Hugging Face Hub.")
    hub_model_id: str | None = arg(None, "Repository: 'name' or 'namespace/name'; by default output_dir's name.")
    hub_private_repo: bool = arg(False, "Create the repository as private; one that exists keeps its visibility.")
    license: str | None = arg(
        None,
        "Licence of the weights, for the model card: an identifier of the Hub, such as apache-2.0, cc-by-4.0 or other.",
    )
    hub_strategy: str = arg(
        "end",
        "end: push once, at the end; every_save: the model at every save; checkpoint: and the newest checkpoint as "
        "last-checkpoint; all_checkpoints: and every checkpoint under its own name.",
        choices=list(STRATEGIES),
    )

    def __post_init__(self) -> None:
        if self.hub_strategy not in STRATEGIES:
            raise ValueError(f"--hub_strategy is {self.hub_strategy!r}; unknown. Choose from {', '.join(STRATEGIES)}.")
        check_repository("--hub_model_id", self.hub_model_id)
        check_license(self.license)


def check_repository(flag: str, name: str | None) -> None:
    """Raise ValueError unless the Hub could have a repository of this name."""
    try:
        if name is not None:
            validate_repo_id(name)
    except HFValidationError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{flag} is {name!r}; {reason}. Give 'name' or 'namespace/name'.") from error


def check_license(name: str | None) -> None:
    """Raise ValueError unless it looks like a licence's identifier, of the Hub's list."""
    if name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise ValueError(
            f"--license is {name!r}; the Hub's identifiers have small letters, digits, dots and hyphens. Give one of "
            "https://hf.co/docs/hub/repositories-licenses, such as apache-2.0 or cc-by-4.0, or other."
        )


class HubPusher(RunCallback):
    """Push at saves and at the end as `--hub_strategy` says; log failures and never raise them.

    As a callback it acts on the main process alone; call its other methods only there.
    """

    arguments = HubArguments
    flag = "push_to_hub"
    reads = "hub_model_id hub_private_repo hub_strategy"

    def __init__(
        self,
        args: HubArguments,
        output_dir: str | Path | None = None,
        timeout: float = 600.0,
        retry_delays: Sequence[float] = RETRY_DELAYS,
    ) -> None:
        """
        Args:
            output_dir: the run's output folder, which is pushed; None until the run has one.
            timeout: seconds that a push may take, in addition to those for its bytes at 1 MB/s.
            retry_delays: seconds before each retry after a server error or a lost connection.
        """
        self.args, self.timeout, self.retry_delays = args, timeout, tuple(retry_delays)
        self._repo_exists = False
        if output_dir is not None:
            self.open(Path(output_dir))
        self._worker: threading.Thread | None = None
        self._saved: set[str] = set()  # names of checkpoints that are to be pushed under their own name
        self._settled: set[str] = set()  # those that are pushed, or reported as lost

    @classmethod
    def attach(cls, given: Parsed) -> "HubPusher":
        """Return the callback with --push_to_hub."""
        return cls(given[HubArguments])

    def open(self, output_dir: Path) -> None:
        """Set the folder that is pushed."""
        self.output_dir = output_dir.absolute()
        self.repo_id = self.args.hub_model_id or repository_name(self.output_dir)
        self._staging = self.output_dir / STAGING

    def on_start(self, run: Any) -> None:
        """Push the run's folder."""
        self.open(run.run.output_dir)

    def on_finish(self, run: Any) -> None:
        """Set the card's repository, whose namespace is known by now."""
        run.run.repository = self.repo_id

    def on_publish(self, run: Any) -> None:
        """Push the model. The process group ends first: other ranks would wait for the Hub in a collective."""
        accelerator = run.run.accelerator
        accelerator.wait_for_everyone()
        accelerator.end_training()
        if accelerator.is_main_process and self.push_model():
            run.published.append(f"pushed to {self.repo_id}")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Create the repository, so that a bad token shows before the training."""
        if not state.is_world_process_zero:
            return
        shutil.rmtree(self._staging, ignore_errors=True)  # a killed run leaves it, and its links keep removed files
        if error := self._upload(min(_START_TIMEOUT, self.timeout)):
            text = "the Hub repository is %s; it cannot be opened: %s. Training goes on and the push is tried again later; "
            logger.warning(text + "check `hf auth whoami`", self.repo_id, error)

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, checkpoint: Path | None = None, **kwargs: Any
    ) -> None:
        """Push `checkpoint`, by default that of the current step, in the background.

        While another push is in progress nothing is pushed; the next save or the end makes up for it.
        """
        if not state.is_world_process_zero or self.args.hub_strategy == "end":
            return
        checkpoint = checkpoint or checkpoint_path(args.output_dir, state.global_step)
        self._saved.add(checkpoint.name)
        if self._worker is None or not self._worker.is_alive():
            self._worker = threading.Thread(target=self._push_checkpoint, args=(checkpoint,), daemon=True)
            self._worker.start()

    def push_model(self) -> bool:
        """Push the output folder as the final model; return True if all of it is on the Hub."""
        if self._worker is not None and self._worker.is_alive():
            logger.info("Waiting for the push in progress")
            self._worker.join()
        error = self._push("End of training", None)
        if error:
            text = "the push to %s failed; %s. The model is safe in %s; push it later with: %s"
            logger.warning(text, self.repo_id, error, self.output_dir, self.command())
        return not error

    def command(self) -> str:
        """Return the shell command that pushes the output folder by hand."""
        private = " --private" if self.args.hub_private_repo else ""
        excluded = " ".join(f'--exclude "{name}"' for name in ("checkpoint-*/*", ".*", "*.tmp", *_OF_MACHINE))
        return f"hf upload {self.repo_id} {shlex.quote(str(self.output_dir))} . {excluded}{private}"

    def _push_checkpoint(self, checkpoint: Path) -> None:
        if error := self._push(f"Step {step_of(checkpoint)}", checkpoint):
            text = "the push of %s to %s failed: %s. It is tried again with the next save"
            logger.warning(text, checkpoint.name, self.repo_id, error)

    def _push(self, message: str, checkpoint: Path | None) -> str | None:
        """Push a checkpoint, or the final model if it is None; return the reason of a failure."""
        try:
            self._stage(checkpoint)
            error = self._upload(upload_limit(size_of(self._staging), self.timeout), message)
            if not error:
                self._settled |= {path.name for path in checkpoint_folders(self._staging)}
                logger.info("Pushed '%s' to %s", message, self.repo_id)
            return error
        except OSError as failure:
            return one_line(failure)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _stage(self, checkpoint: Path | None) -> None:
        """Link the files to push into the staging folder, where rotation cannot remove them."""
        shutil.rmtree(self._staging, ignore_errors=True)
        found = checkpoint_folders(self.output_dir)
        _link_tree(
            checkpoint or self.output_dir, self._staging, (*_HIDDEN, *_OF_MACHINE, *_RESUME_STATE, "checkpoint-*")
        )
        if self.args.hub_strategy == "checkpoint" and found:
            _link_tree(checkpoint or found[-1], self._staging / "last-checkpoint", _HIDDEN)
        elif self.args.hub_strategy == "all_checkpoints":
            if lost := self._saved - self._settled - {path.name for path in found}:
                self._settled |= lost
                logger.warning("Removed before a push succeeded, and not on the Hub: %s", ", ".join(sorted(lost)))
            for path in found:
                if path.name not in self._settled:
                    _link_tree(path, self._staging / path.name, _HIDDEN)

    def _upload(self, limit: float, message: str | None = None) -> str | None:
        """Create the repository and commit the staged files, within `limit` seconds.

        It happens in a process that is killed at the limit. Without `message` nothing is committed. Return the reason of a
        failure.
        """
        work: dict[str, Any] = {
            "repo_id": self.repo_id,
            "private": self.args.hub_private_repo,
            "create": not self._repo_exists,
            "retry_delays": self.retry_delays,
        }
        if message is not None:
            # A checkpoint is replaced as a whole: files of the previous one do not belong to it.
            replaced = ["last-checkpoint/*"] if (self._staging / "last-checkpoint").is_dir() else None
            work |= {"folder": str(self._staging), "commit_message": message, "delete_patterns": replaced}
        self.repo_id, problem = upload_apart(limit, **work)
        self._repo_exists = self._repo_exists or not problem
        return problem


def _link_tree(source: Path, target: Path, ignore: Sequence[str]) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignore), copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def repository_name(output_dir: Path) -> str:
    """Return the folder's name without characters that the Hub refuses."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", output_dir.resolve().name)
    name = re.sub(r"\.git$", "", re.sub(r"--+|\.\.+", "-", name)).strip("-.")
    return name[:96].rstrip("-.") or "model"
