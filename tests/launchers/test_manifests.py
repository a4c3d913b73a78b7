"""The Kubernetes files: commands that parse, and what every pod needs."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.kit.commands import Command, parse

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    document
    for path in (ROOT / "launchers").glob("*.yaml")
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
LONGEST_SAVE = 240  # seconds that torchrun waits for its processes, in all files


def found(value: Any, key: str) -> Iterator[Any]:
    """Yield what stands under a key, anywhere in a document."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from found(each, key)


def document_of(kind: str) -> dict[str, Any]:
    [match] = [document for document in DOCUMENTS if document["kind"] == kind]
    return match


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_torchrun_and_the_script_take_their_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = found(document_of(kind), "command")
    assert command[0] == "torchrun"
    given = get_args_parser().parse_args(command[1:])
    assert given.training_script == "scripts/pretrain.py"
    parse(Command(kind, "scripts.pretrain", given.training_script_args), monkeypatch)
    assert given.training_script_args[-1] == "--resume_from_checkpoint=latest"
    [variables] = found(document_of(kind), "env")
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(LONGEST_SAVE)} in variables


def test_the_workers_of_ray_are_the_gpus_of_its_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = document_of("RayJob")["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["python", "scripts/launch_ray.py"]
    script = words.index("scripts/pretrain.py")
    flags = dict(zip(words[2:script:2], words[3:script:2], strict=True))
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    limits = next(found(group, "limits"))
    gpus = limits["nvidia.com/gpu"]
    assert flags["--num_workers"] == f"{gpus * group['minReplicas']}:{gpus * group['maxReplicas']}"
    assert int(flags["--cpus_per_worker"]) * gpus <= int(limits["cpu"])
    assert flags["--storage_path"].startswith("/outputs/")
    assert words[-2:] == ["--resume_from_checkpoint", "latest"]
    parse(Command(spec["entrypoint"], "scripts.pretrain", words[script + 1 :]), monkeypatch)
