"""Connect to Ray and train on it, by Ray Train: workers, restarts, other numbers."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mm_utils.cores import available_cores
from mm_utils.distributed import RENDEZVOUS_TIMEOUT, RunError
from mm_utils.launch.arguments import Command, LaunchArguments
from mm_utils.launch.worker import work
from mm_utils.text import without_secrets

# What Ray says every second where its dashboard is missing; read when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "State API may be temporarily unavailable")
try:
    import ray
    from ray.exceptions import RayError
    from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    from mm_utils.launch.refusals import EndWhenRefused, Refused
except ImportError as error:
    raise RunError(f"Ray is not installed, or is older than 2.60 ({error}). pip install 'ray[train,tune]'") from error

RESIZE_SECONDS = 60.0  # between looks for more machines, in elastic training
_ROOT = Path(__file__).resolve().parents[2]
_PASSED_ON = re.compile("(ACCELERATE|FSDP|HF|NCCL|OMP|TORCH|WANDB)_")
_SECRET = re.compile("KEY|PASS|SECRET|TOKEN")  # not passed on: Ray shows what is


@contextmanager
def connect(args: LaunchArguments) -> Iterator[dict[str, float]]:
    """Connect to the cluster, or start a small one here; give what a worker needs of it.

    Raises:
        RunError: if there is no such cluster, or the workers need GPUs that this machine does not have.
    """
    address = args.address or os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {}
    if address is None:
        own["num_cpus"] = max(available_cores(), args.workers[1] * args.cpus_per_worker)
        own |= {"object_store_memory": 100 << 20, "include_dashboard": False}  # next to nothing goes through the store
    try:
        ray.init(address=address or "local", runtime_env={"env_vars": _variables(args)}, **own)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise RunError(f"--address is {address}; Ray cannot be reached: {error}. Look at ray status.") from error
    try:
        has_gpus = ray.cluster_resources().get("GPU", 0.0) > 0
        gpus = float(has_gpus) if args.gpus_per_worker is None else args.gpus_per_worker  # one, if any
        if gpus and not has_gpus and address is None:  # a cluster may get them later
            raise RunError(
                f"--gpus_per_worker is {gpus:g}; Ray sees no GPU on this machine. Look at nvidia-smi, or give 0."
            )
        yield {"CPU": float(args.cpus_per_worker), **({"GPU": gpus} if gpus else {})}
    finally:  # Ray prints what it still holds of the workers' lines, before an error is shown
        ray.shutdown()


def _variables(args: LaunchArguments) -> dict[str, str]:
    """Return the environment of Ray's processes, what `accelerate launch` would set included."""
    known = {name: value for name, value in os.environ.items() if _PASSED_ON.match(name) and not _SECRET.search(name)}
    shown = without_secrets(known)  # an address may hold a password
    passed = {name: value for name, value in known.items() if shown[name] == value}
    passed |= dict.fromkeys(("TQDM_MININTERVAL", "TQDM_MAXINTERVAL"), "60")  # Ray sends a line for each state of a bar
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**passed, "PYTHONPATH": path, "ACCELERATE_MIXED_PRECISION": args.mixed_precision}


def fit(args: LaunchArguments, command: Command, resources: Mapping[str, float], name: str) -> dict[str, float]:
    """Train on Ray's workers, each with `resources`, and return the script's metrics; `name` is that of this launch alone.

    Lost workers are restarted by Ray, and the script resumes from its newest checkpoint, as it does under every launcher that
    restarts it.

    Raises:
        RunError: if the script was refused, or failed more often than `--max_failures` says.
    """
    least, most = args.workers
    scaling: dict[str, Any] = {"num_workers": most}
    if least < most:
        scaling = {"num_workers": (least, most), "elastic_resize_monitor_interval_s": RESIZE_SECONDS}
    task = {**asdict(command), "launch": f"ray:{name}", "on_cpu": "GPU" not in resources}
    trainer = TorchTrainer(
        work,
        train_loop_config=task,
        torch_config=TorchConfig(timeout_s=int(RENDEZVOUS_TIMEOUT)),
        scaling_config=ScalingConfig(use_gpu="GPU" in resources, resources_per_worker=dict(resources), **scaling),
        run_config=RunConfig(
            name=name,
            storage_path=command.records,
            failure_config=FailureConfig(max_failures=args.max_failures),
            callbacks=[EndWhenRefused()],
        ),
    )
    try:
        return trainer.fit().return_value
    except TrainingFailedError as error:
        cause = error.controller_failure if isinstance(error, ControllerError) else None
        if isinstance(cause, Refused):
            raise RunError(str(cause)) from error
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise RunError(
            f"--max_failures is {args.max_failures}; Ray ended the run: {lines[-1] if lines else type(error).__name__}. The "
            "log has the first error. To go on, launch it again with --resume_from_checkpoint latest."
        ) from error
