"""The command `tandem`: every script by a short name, from any folder, in one process."""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mm_utils import __version__

COMMANDS = {
    "prepare": ("prepare_data", "check pairs, find duplicates and leaks, write a data set"),
    "pretrain": ("pretrain", "train an image encoder and a text encoder together"),
    "finetune": ("finetune", "train a classifier on top of a model"),
    "eval": ("eval_retrieval", "measure retrieval"),
    "zero-shot": ("eval_zero_shot", "classify by the names of classes"),
    "embed": ("embed", "embed media into an index, or update one"),
    "search": ("search", "search an index, or serve its page"),
    "export": ("export", "write ONNX and layouts that other tools read"),
    "verify": ("verify_checkpoints", "read every byte of a run's checkpoints"),
    "ray": ("launch_ray", "run a script on a Ray cluster"),
}


def scripts_folder() -> Path:
    """Return the folder of the scripts: beside the package in a checkout, inside it where it is installed."""
    package = Path(__file__).resolve().parent
    beside = package.parent / "scripts"
    return beside if (beside / "pretrain.py").is_file() else package / "scripts"


def versions() -> str:
    """Return the versions of this project and of the libraries that a question about a run begins with, on one line."""
    libraries = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    return ", ".join([f"tandem {__version__}", *libraries])


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process by the script's; without a command, print them."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {command:<10} {what}" for command, (_, what) in COMMANDS.items()]
        sys.stdout.write(
            "\n".join(["usage: tandem COMMAND [flags]", "", *lines, "", "tandem COMMAND --help", "tandem --version"])
            + "\n"
        )
        return
    if name == "--version":
        sys.stdout.write(f"{versions()}\n")
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        sys.exit(f"tandem: there is no command {name}.{meant} Run tandem --help for the list.")
    os.execv(sys.executable, [sys.executable, str(scripts_folder() / f"{COMMANDS[name][0]}.py"), *words])
