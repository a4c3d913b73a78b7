"""The command line of `scripts/launch_ray.py`: its flags, the script, the script's flags."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_utils.arguments import arg, launch_command, to_dict, to_words


@dataclass
class LaunchArguments:
    """Ray: cluster, workers, restarts, sweep."""

    num_workers: str = arg("1", "Workers that train together, one process each; MIN:MAX for any number while it runs.")
    gpus_per_worker: float | None = arg(
        None, "GPUs of a worker; 0 trains on the CPU. (default: 1 where Ray has GPUs, else 0)"
    )
    cpus_per_worker: int = arg(
        1, "CPU cores that Ray reserves for a worker, and threads that it computes with.", least=1
    )
    mixed_precision: str = arg("no", "As of accelerate launch.", choices=["no", "fp16", "bf16"])
    max_failures: int = arg(
        3,
        "Restarts after workers or machines are lost; -1 = any number. A mistake in the flags is not tried again.",
        least=-1,
    )
    address: str | None = arg(
        None, "A Ray cluster that runs, e.g. auto. (default: that of RAY_ADDRESS, else a small one on this machine)"
    )
    storage_path: str = arg("outputs/ray", "The folder of Ray's own records; all machines must share it.")
    tune: str | None = arg(
        None,
        "A sweep: a flag of the script and its values, e.g. learning_rate=1e-4,3e-4; more flags after ';', and every "
        "combination is a trial.",
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(:\d+)?", self.num_workers) or not 1 <= self.workers[0] <= self.workers[1]:
            raise ValueError(f"--num_workers is {self.num_workers}; give a number from 1 on, or MIN:MAX, such as 2:8.")
        if self.tune is not None and ":" in self.num_workers:
            raise ValueError(
                f"--tune is {self.tune}, and --num_workers is {self.num_workers}; trials need one number."
            )
        parse_grid(self.tune)

    @property
    def workers(self) -> tuple[int, int]:
        """The fewest and the most workers."""
        fewest, _, most = self.num_workers.partition(":")
        return int(fewest), int(most or fewest)


@dataclass(frozen=True)
class Command:
    """What is launched."""

    script: str  # its path
    argv: tuple[str, ...]
    folder: str  # in which relative paths begin
    launcher: str  # stands before the script in a command that starts it like this one; of a sweep, one trial of it
    records: str  # the folder or address of Ray's records

    def value_of(self, flag: str) -> str | None:
        """Return the value of a flag, such as `output_dir`, among the arguments; the last one counts."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(f"--{flag}", f"--{flag.replace('_', '-')}", dest="value")
        return parser.parse_known_args(self.argv)[0].value


def split_words(words: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the launcher's words, the script (the first that ends with `.py`), and its words."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        return list(words), None, []
    return list(words[:place]), words[place], list(words[place + 1 :])


def read_command(args: LaunchArguments, script: str | None, argv: Sequence[str]) -> Command:
    """Check and return what is to be launched from the working folder.

    Raises:
        ValueError: if there is no such script, or the output folder would be lost or shared.
    """
    folder = Path.cwd()
    if script is None or not Path(script).is_file():
        raise ValueError(
            f"the script is {script}; there is no such file in {folder}. Write its path after the launcher's flags."
        )
    launcher = launch_command("launch_ray", to_words(LaunchArguments, to_dict(args), ["tune"]), "python")
    records = args.storage_path if "://" in args.storage_path else str(folder / args.storage_path)
    command = Command(str(Path(script).resolve()), tuple(argv), str(folder), launcher, records)
    flag = "index_dir" if Path(script).stem == "embed" else "output_dir"
    value = command.value_of(flag)
    if args.tune is not None and value is None:
        raise ValueError("--tune needs --output_dir among the script's arguments: every trial gets a folder in it.")
    if "working_dir_files" in folder.parts and not Path(value or "").is_absolute():  # of `ray job submit`
        raise ValueError(
            f"--{flag} is {value}; the working folder {folder} is a copy that Ray removes after the job. Give an absolute "
            "path that all machines share."
        )
    return command


def parse_grid(text: str | None) -> dict[str, list[str]]:
    """Return the values of each flag of a sweep, in the given order; empty without a text.

    Raises:
        ValueError: if the text is not a list of flags and different values.
    """
    grid: dict[str, list[str]] = {}
    for part in text.split(";") if text is not None else ():
        name, _, listed = part.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        # values with commas stand apart by |: objectives=contrastive:1|contrastive:1,matching:1
        values = [value.strip() for value in listed.split("|" if "|" in listed else ",")]
        # `_slug`: two values may not share the name of a folder
        if not name.isidentifier() or name in grid or "" in values or len(set(map(_slug, values))) < len(values):
            raise ValueError(
                f"--tune is {text}; '{part}' is not a new flag with different values. Write e.g. learning_rate=1e-4,3e-4."
            )
        grid[name] = values
    return grid


def trial_name(values: Mapping[str, str]) -> str:
    """Return the name of a trial's folder, such as `learning_rate-1e-4_seed-2`."""
    return "_".join(f"{name}-{_slug(value)}" for name, value in values.items())


def _slug(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", value)  # 'recipes/clip.yaml' -> 'recipes-clip.yaml'
