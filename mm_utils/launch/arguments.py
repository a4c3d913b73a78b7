"""The command line of `scripts/launch_ray.py`: its flags, the script, the script's flags."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mm_utils.arguments import arg, launch_command, to_dict, to_words

PRECISIONS = ("no", "fp16", "bf16")
_FLAG = re.compile(r"[a-z][a-z0-9_]*")
_NOT_TUNED = {
    "output_dir": "every trial has a folder of its own in the script's --output_dir",
    "resume_from_checkpoint": "give it to the script, for all trials",
    "config": "give one file to the script, for all trials",
    "dry_run": "give it to the script, without --tune",
}


@dataclass
class LaunchArguments:
    """Ray: cluster, workers, restarts, sweep."""

    num_workers: int | None = arg(None, "Workers that train together, one process each. (default: 1)")
    min_workers: int | None = arg(
        None, "Elastic: the fewest workers to train with while machines are missing; with --max_workers."
    )
    max_workers: int | None = arg(None, "Elastic: the most workers to train with; with --min_workers.")
    gpus_per_worker: float | None = arg(
        None, "GPUs of a worker; 0 trains on the CPU. (default: 1 where Ray has GPUs, else 0)"
    )
    cpus_per_worker: int = arg(1, "CPU cores that Ray reserves for a worker, and threads that it computes with.")
    mixed_precision: str = arg("no", f"As of accelerate launch: {', '.join(PRECISIONS)}.")
    max_failures: int = arg(
        3, "Restarts after workers or machines are lost; -1 = any number. A mistake in the flags is not tried again."
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
        least, most, number, place = self.min_workers, self.max_workers, self.num_workers, Path(self.storage_path)
        elastic = f"--min_workers is {least}, --max_workers {most}"
        for is_wrong, message in (
            ((least is None) != (most is None), f"{elastic}; elastic training needs both. Give both."),
            (
                least is not None and number is not None,
                f"--num_workers is {number}; with --min_workers and --max_workers, Ray chooses the number. Leave it out.",
            ),
            (
                least is not None and most is not None and not 1 <= least <= most,
                f"{elastic}; give at least 1, and not more than the most.",
            ),
            (number is not None and number < 1, f"--num_workers is {number}; give at least 1."),
            (self.cpus_per_worker < 1, f"--cpus_per_worker is {self.cpus_per_worker}; give at least 1."),
            ((self.gpus_per_worker or 0) < 0, f"--gpus_per_worker is {self.gpus_per_worker}; give 0 (CPU) or more."),
            (
                self.mixed_precision not in PRECISIONS,
                f"--mixed_precision is {self.mixed_precision}; choose from {', '.join(PRECISIONS)}.",
            ),
            (self.max_failures < -1, f"--max_failures is {self.max_failures}; give -1 (any number), 0 or more."),
            (
                self.tune is not None and least is not None,
                f"--tune is {self.tune}; elastic trials would take each other's machines. Give --num_workers instead of "
                "--min_workers and --max_workers.",
            ),
            (
                "://" not in self.storage_path and any(each.is_file() for each in (place, *place.parents)),
                f"--storage_path is {place}; it is a file, or lies in one. Give a folder, or the name of a new one.",
            ),
        ):
            if is_wrong:
                raise ValueError(message)
        parse_grid(self.tune)

    @property
    def workers(self) -> tuple[int, int]:
        """The fewest and the most workers."""
        if self.min_workers is not None and self.max_workers is not None:
            return self.min_workers, self.max_workers
        return self.num_workers or 1, self.num_workers or 1


@dataclass(frozen=True)
class Command:
    """What is launched.

    Attributes:
        script: the path of a training script.
        argv: its arguments.
        folder: in which their relative paths begin.
        launcher: what stands before the script in a command that starts it like this one; of a sweep, one trial of it.
    """

    script: str
    argv: tuple[str, ...]
    folder: str
    launcher: str

    def folder_of(self, flag: str) -> str | None:
        """Return the value of a flag, such as `output_dir`, among the arguments; the last one counts."""
        found = None
        for place, word in enumerate(self.argv):
            name, equals, value = word.partition("=")
            if name.replace("-", "_") == f"__{flag}":
                found = value if equals else next(iter(self.argv[place + 1 : place + 2]), None)
        return found

    def with_values(self, values: Mapping[str, str], output_dir: str) -> "Command":
        """Return this command with flags set, over earlier ones, and another output folder."""
        words = [word for name, value in values.items() for word in (f"--{name}", value)]
        return replace(self, argv=(*self.argv, *words, "--output_dir", output_dir))


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
    if script is None:
        raise ValueError("no script is given; write it after the launcher's flags, e.g. scripts/pretrain.py.")
    if not Path(script).is_file():
        raise ValueError(f"the script is {script}; there is no such file in {folder}. Give its path.")
    launcher = launch_command("launch_ray", to_words(LaunchArguments, to_dict(args), ["tune"]), "python")
    is_copy = "working_dir_files" in folder.parts  # of the folder that a job was submitted in
    launcher = f"ray job submit --working-dir . -- {launcher}" if is_copy else launcher
    command = Command(str(Path(script).resolve()), tuple(argv), str(folder), launcher)
    flag = "index_dir" if Path(script).stem == "embed" else "output_dir"
    given = command.folder_of(flag)
    if args.tune is not None and given is None:
        raise ValueError("--tune needs --output_dir among the script's arguments: every trial gets a folder in it.")
    reason = f"the working folder {folder} is a copy that Ray removes after the job" if is_copy else ""
    if reason and not Path(given or "").is_absolute():
        raise ValueError(f"--{flag} is {given}; {reason}. Give an absolute path that all machines share.")
    return command


def parse_grid(text: str | None) -> dict[str, list[str]]:
    """Return the values of each flag of a sweep, in the given order; empty without a text.

    Raises:
        ValueError: if the text is not a list of flags and values.
    """
    grid: dict[str, list[str]] = {}
    for part in text.split(";") if text is not None else ():
        name, equals, listed = part.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        values = [value.strip() for value in listed.split(",")]
        title = f"--tune is {text}"
        if not equals or not _FLAG.fullmatch(name):
            raise ValueError(f"{title}; '{part}' is not a flag with values. Write e.g. learning_rate=1e-4,3e-4.")
        if name in _NOT_TUNED:
            raise ValueError(f"{title}; {name} cannot be swept: {_NOT_TUNED[name]}.")
        if name in grid:
            raise ValueError(f"{title}; {name} is there twice. Write all its values after one '='.")
        if "" in values:
            raise ValueError(f"{title}; {name} has an empty value. Write e.g. learning_rate=1e-4,3e-4.")
        if len({trial_name({name: value}) for value in values}) < len(values):
            raise ValueError(f"{title}; {name} has a value twice. Give different values.")
        grid[name] = values
    return grid


def trial_name(values: Mapping[str, str]) -> str:
    """Return the name of a trial's folder, such as `learning_rate-1e-4_seed-2`."""
    return "_".join(f"{name}-{re.sub(r'[^A-Za-z0-9.+-]+', '-', value)}" for name, value in values.items())
