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
FILES = sorted((ROOT / "launchers").glob("*.yaml"))
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}")
    for path in FILES
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


def torchrun_arguments(document: dict[str, Any]) -> Any:
    [command] = found(document, "command")
    assert command[0] == "torchrun"
    return get_args_parser().parse_args(command[1:])


def document_of(kind: str) -> dict[str, Any]:
    [match] = [each.values[0] for each in DOCUMENTS if each.values[0]["kind"] == kind]
    return match


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_pod_has_shared_memory_and_an_output_volume(document: dict[str, Any]) -> None:
    for pod in [each for each in found(document, "spec") if "containers" in each]:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        [container] = pod["containers"]
        mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in mounts["/outputs"]
        assert not volumes, "a volume that nothing mounts"
        if container["name"] != "ray-head":
            assert pod["terminationGracePeriodSeconds"] >= LONGEST_SAVE + 60


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_torchrun_and_the_script_take_their_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torchrun_arguments(document_of(kind))
    assert given.training_script == "scripts/pretrain.py"
    parse(Command(kind, "scripts.pretrain", given.training_script_args), monkeypatch)
    assert given.training_script_args[-1] == "--resume_from_checkpoint=latest"
    [variables] = found(document_of(kind), "env")
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(LONGEST_SAVE)} in variables


def test_the_machines_of_a_job_set_meet() -> None:
    job_set, given = document_of("JobSet"), torchrun_arguments(document_of("JobSet"))
    [workers] = job_set["spec"]["replicatedJobs"]
    name, job = job_set["metadata"]["name"], workers["template"]["spec"]
    assert given.rdzv_endpoint == f"{name}-{workers['name']}-0-0.{name}:29500"
    assert given.nnodes == f"1:{job['completions']}"
    assert job["completions"] == job["parallelism"]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in next(found(job, "env"))


def test_a_train_job_leaves_its_machines_to_kubeflow() -> None:
    job, runtime = document_of("TrainJob")["spec"], document_of("TrainingRuntime")
    assert job["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    given = torchrun_arguments(document_of("TrainJob"))
    assert (given.nnodes, given.master_addr, given.rdzv_backend) == ("1:1", "127.0.0.1", "static")
    [trained] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert trained["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    [pod] = [each for each in found(trained, "spec") if "containers" in each]
    assert [container["name"] for container in pod["containers"]] == ["node"], "where Kubeflow puts its variables"


def test_the_workers_of_ray_are_the_gpus_of_its_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = document_of("RayJob")["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["python", "scripts/launch_ray.py"]
    script = words.index("scripts/pretrain.py")
    flags = dict(zip(words[2:script:2], words[3:script:2], strict=True))
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    limits = next(found(group, "limits"))
    gpus = limits["nvidia.com/gpu"]
    assert int(flags["--min_workers"]) == gpus * group["minReplicas"]
    assert int(flags["--max_workers"]) == gpus * group["maxReplicas"]
    assert int(flags["--cpus_per_worker"]) * gpus <= int(limits["cpu"])
    assert flags["--storage_path"].startswith("/outputs/")
    assert words[-2:] == ["--resume_from_checkpoint", "latest"]
    parse(Command(spec["entrypoint"], "scripts.pretrain", words[script + 1 :]), monkeypatch)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_how_it_is_started_and_what_to_change(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"kubectl apply -f launchers/{path.name}" in text
    assert text.count("Change") >= 4
