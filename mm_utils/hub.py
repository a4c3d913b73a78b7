"""Push a run's output folder to the Hugging Face Hub without ever endangering the run.

A push works on hard links taken at the call, so a checkpoint that rotates away, or a file rewritten meanwhile by a
rename, cannot spoil it, and the model and its resumable state arrive in the same commit. Call it on one process only.
"""

import logging
import os
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from mm_utils.arguments import arg
from mm_utils.checkpoints import checkpoint_folders

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
# The client speaks HTTP through requests, httpx or httpx2, by version: their common error is the last base class of
# its own error that is not a built-in.
CLIENT_ERROR: type[Exception] = [
    base for base in HfHubHTTPError.__mro__ if issubclass(base, Exception) and base.__module__ != "builtins"
][-1]
# RuntimeError wraps what a parallel upload raised; LookupError and ValueError are answers that are not the Hub's.
PUSH_ERRORS: tuple[type[Exception], ...] = (CLIENT_ERROR, OSError, RuntimeError, ValueError, LookupError)
HIDDEN = ("*.tmp", ".*", "__pycache__")
RESUME_STATE = ("optimizer*", "scheduler*", "scaler*", "random_states*", "rng_state*")
MODEL_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json", "*.py")


@dataclass
class HubArguments:
    """Where and when to push. The token comes from `hf auth login` or HF_TOKEN and is never a flag."""

    push_to_hub: bool = arg(False, "Push the model to the Hugging Face Hub.")
    hub_model_id: str | None = arg(None, "Repository: 'name' or 'namespace/name'; by default output_dir's name.")
    hub_private_repo: bool = arg(False, "Create the repository as private; one that exists keeps its visibility.")
    hub_strategy: str = arg(
        "end",
        "end: push once, at the end; every_save: the model at every save; checkpoint: and the newest checkpoint as "
        "last-checkpoint; all_checkpoints: and every checkpoint under its own name.",
        choices=list(STRATEGIES),
    )

    def __post_init__(self) -> None:
        if self.hub_strategy not in STRATEGIES:
            raise ValueError(f"--hub_strategy is {self.hub_strategy!r}; unknown. Choose from {', '.join(STRATEGIES)}.")
        if self.hub_model_id is None:
            return
        try:
            validate_repo_id(self.hub_model_id)
        except HFValidationError as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"--hub_model_id is {self.hub_model_id!r}; {reason}. Give 'name' or 'namespace/name'."
            ) from error


class HubPusher:
    """Create the repository, push during training and at the end; report failures, never raise them."""

    def __init__(self, args: HubArguments, output_dir: str | Path, retry_delays: Sequence[float] = (2.0, 8.0)) -> None:
        """`retry_delays` are the seconds to wait before each new try after a server error or a timeout."""
        self.args = args
        self.output_dir = Path(output_dir)
        self.retry_delays = tuple(retry_delays)
        self.repo_id = args.hub_model_id or _repo_name(self.output_dir)
        self._repo_exists = False
        self._background: threading.Thread | None = None

    def start(self) -> bool:
        """Create the repository now, so that a bad token shows at once; whether it can be pushed to."""
        if not self.args.push_to_hub:
            return False
        try:
            self._create_repo(_api())
        except PUSH_ERRORS as error:
            logger.warning(
                "the Hub repository is %s; it cannot be opened: %s. Training goes on and the push is tried again at "
                "the end; check `hf auth whoami`",
                self.repo_id,
                _one_line(error),
            )
            return False
        return True

    def push(self, message: str, blocking: bool, checkpoint: Path | None = None) -> bool:
        """Push the output folder as one commit; with `blocking`, True says that the bytes are on the Hub.

        `blocking=False` is for saves during training: it returns at once, True if an upload was started, False under
        strategy "end" or while another is running. The model then comes from `checkpoint`. The strategies that push
        checkpoints take `checkpoint`, or without it those in the output folder.
        """
        if not self.args.push_to_hub or (not blocking and self.args.hub_strategy == "end"):
            return False
        if self._background is not None and self._background.is_alive():
            if not blocking:
                logger.info("push '%s' skipped: the one before is still running", message)
                return False
            self.wait()
        try:
            folder = self._stage(checkpoint, model_from_checkpoint=not blocking)
        except OSError as error:
            self._report(error)
            return False
        if blocking:
            return self._upload(folder, message)
        self._background = threading.Thread(target=self._upload, args=(folder, message), daemon=True, name="hub-push")
        self._background.start()
        return True

    def wait(self) -> None:
        """Return when no push is running any more."""
        if self._background is not None and self._background.is_alive():
            logger.info("waiting for the push in progress")
            self._background.join()

    def command(self) -> str:
        """The shell command that pushes the output folder by hand."""
        private = " --private" if self.args.hub_private_repo else ""
        where = shlex.quote(str(self.output_dir))
        return (
            f'hf upload {self.repo_id} {where} . --exclude "checkpoint-*/*" --exclude ".*" --exclude "*.tmp"{private}'
        )

    def _create_repo(self, api: HfApi) -> None:
        if not self._repo_exists:
            # None, not False: an organisation whose default is private keeps it.
            private = self.args.hub_private_repo or None
            self.repo_id = api.create_repo(self.repo_id, private=private, exist_ok=True).repo_id
            self._repo_exists = True

    def _stage(self, checkpoint: Path | None, model_from_checkpoint: bool) -> Path:
        """Lay out the repository as hard links in a hidden folder of the output folder."""
        for leftover in self.output_dir.glob(".push-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".push-", dir=self.output_dir))
        try:
            _link_tree(self.output_dir, folder, (*HIDDEN, *RESUME_STATE, "checkpoint-*"))
            if checkpoint is not None and model_from_checkpoint:
                for path in (path for pattern in MODEL_FILES for path in checkpoint.glob(pattern)):
                    _link(str(path), str(folder / path.name))
            saved = [checkpoint] if checkpoint is not None else checkpoint_folders(self.output_dir)
            if self.args.hub_strategy == "checkpoint" and saved:
                _link_tree(saved[-1], folder / "last-checkpoint", HIDDEN)
            elif self.args.hub_strategy == "all_checkpoints":
                for path in saved:
                    _link_tree(path, folder / path.name, HIDDEN)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _upload(self, folder: Path, message: str) -> bool:
        delays = list(self.retry_delays)
        try:
            while True:
                try:
                    self._upload_once(folder, message)
                    return True
                except PUSH_ERRORS as error:
                    if not delays or not _is_transient(error):
                        self._report(error)
                        return False
                    logger.info("push '%s' failed: %s; trying again in %g s", message, _one_line(error), delays[0])
                time.sleep(delays.pop(0))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _upload_once(self, folder: Path, message: str) -> None:
        api = _api()
        self._create_repo(api)
        api.upload_folder(
            repo_id=self.repo_id,
            folder_path=folder,
            commit_message=message,
            # A checkpoint is replaced as a whole: files of the one before would not belong to it.
            delete_patterns=["last-checkpoint/*"] if (folder / "last-checkpoint").is_dir() else None,
        )
        logger.info("pushed '%s' to %s", message, self.repo_id)

    def _report(self, error: Exception) -> None:
        logger.warning(
            "the push to %s is incomplete; %s. The model is safe in %s; push it later with: %s",
            self.repo_id,
            _one_line(error),
            self.output_dir,
            self.command(),
        )


_SECRET_NAME = r"[\w-]*?(?<![a-z])(?:token|secret|password|passwd|(?:api|access)[_-]?key)(?![a-z])[\w-]*"
_VALUE = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|\S)+"""
_REDACTIONS = [
    (re.compile(pattern, re.IGNORECASE | re.MULTILINE), replacement)
    for pattern, replacement in (
        # '--password=two words', as shlex.join quotes a whole word; a quote inside is '"'"'
        (rf"""'(--?{_SECRET_NAME}=)(?:'"'"'|[^'])*'""", r"'\1***'"),
        # --hub_token VALUE, also over a line continued with a backslash; not --use_token --next_flag
        (rf"(?<![\w-])(--?{_SECRET_NAME}(?:=|(?:\s|\\\n)+))(?!--){_VALUE}", r"\1***"),
        # YAML: hub_token: VALUE WITH SPACES
        (rf"^([ \t]*{_SECRET_NAME}:[ \t]+)\S.*$", r"\1***"),
        # WANDB_API_KEY=VALUE and "token": "VALUE"
        (rf"""(?<![\w-])(["']?{_SECRET_NAME}["']?[ \t]*[:=][ \t]*){_VALUE}""", r"\1***"),
        (r"(bearer\s+)\S+", r"\1***"),
        (r"(?<=://)[^\s/]*@", "***@"),
        (r"(?<![a-z0-9])hf_(?:(?:oauth|jwt|app)_[\w.-]+|[a-z0-9]{10,})", "***"),
    )
]
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)$", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace by ``***`` whatever looks like a secret, so that `text` can be published.

    Covered: Hub tokens, values of flags, variables and YAML or JSON keys named after a token, secret, password or API
    key, credentials in URLs, bearer headers, and the values that such environment variables have right now.
    """
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and len(value.strip()) >= 8:
            text = text.replace(value.strip(), "***")
    for pattern, replacement in _REDACTIONS:
        text = pattern.sub(replacement, text)
    return text


def _api() -> HfApi:
    """A client for the endpoint that the environment names now, not when the library was imported."""
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None)


def _is_transient(error: BaseException) -> bool:
    """Whether trying again may help: a server error, too many requests, a timeout, a lost connection."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled) or not isinstance(error, (CLIENT_ERROR, ConnectionError, TimeoutError)):
        return False
    response = getattr(error, "response", None)
    return response is None or response.status_code in (408, 429) or response.status_code >= 500


def _one_line(error: BaseException, limit: int = 300) -> str:
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return redact(" ".join(f"{type(error).__name__}: {error}".split()))[:limit].rstrip(".")


def _repo_name(output_dir: Path) -> str:
    """`output_dir`'s name with what the Hub does not accept in a repository's name replaced."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", output_dir.resolve().name)
    name = re.sub(r"\.git$", "", re.sub(r"--+|\.\.+", "-", name)).strip("-.")
    return name[:96].rstrip("-.") or "model"


def _link_tree(source: Path, target: Path, ignore: Sequence[str]) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignore), copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> str:
    """Hard-link, or copy where the file system has no links."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
    return target
