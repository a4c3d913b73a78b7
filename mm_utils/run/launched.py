"""What launchers and the configuration of Accelerate set in the environment: how many processes there are, and what no run does."""

from collections.abc import Mapping

from mm_utils.distributed import RunError

# SLURM_STEP_NUM_TASKS is of a step that srun started; SLURM_NTASKS is of a whole job, whose script is one process.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMIX_RANK", "SLURM_PROCID")  # of launchers that may name no size
_OFF = "", "0", "false", "no"
_ACCEPTED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("", "1"),
        "it would divide gradients and accumulate none, as a step is --global_batch_size pairs. Set it to 1, and give "
        "--micro_batch_size to hold fewer pairs at a time",
    ),
    "ACCELERATE_MIXED_PRECISION": (
        ("", "no", "bf16", "fp16"),
        "training is in fp32, bf16 or fp16. Set no, bf16 or fp16",
    ),
    "ACCELERATE_DYNAMO_BACKEND": (_OFF, "the model is compiled by --torch_compile. Set it to no"),
    "ACCELERATE_USE_MEGATRON_LM": (_OFF, "weights are sharded by FSDP2. Use accelerate_configs/fsdp2.yaml"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        _OFF,
        "processes share the batch, and weights by FSDP2, but no tensors or sequences. Use accelerate_configs/fsdp2.yaml",
    ),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": (_OFF, "processes meet by torch.distributed. Set it to NO"),
    "FSDP_ACTIVATION_CHECKPOINTING": (_OFF, "it renames weights. Set it to false, and give --gradient_checkpointing"),
    "FSDP_IGNORED_MODULES": (("",), "all weights are sharded. Leave it out"),
}
"""Variables of Accelerate: the values that a run can follow, and why it refuses others and what to do instead."""


def refuse_settings(environment: Mapping[str, str]) -> None:
    """Raise RunError for the first setting of Accelerate that would be ignored, or would change what is learnt."""
    for name, (accepted, reason) in _ACCEPTED.items():
        value = environment.get(name, "")
        if value.lower() not in accepted:
            raise RunError(f"{name} is {value}, in the environment or in the configuration of accelerate; {reason}.")


def launched_processes(environment: Mapping[str, str]) -> tuple[int, str]:
    """Return how many processes a launcher has started, as far as it says so, and the variable that says it."""
    if environment.get("WORLD_SIZE", "").isdecimal():
        return int(environment["WORLD_SIZE"]), "WORLD_SIZE"
    known = {name: environment[name] for name in (*_SIZES, *_RANKS) if environment.get(name, "").isdecimal()}
    counts = [(int(value) + (name in _RANKS), name) for name, value in known.items()]  # ranks count from 0
    return max(counts, default=(1, ""))


def check_processes(launched: tuple[int, str], seen: int) -> None:
    """Raise RunError if a launcher has started other processes than those that this one sees."""
    count, name = launched
    if count == seen:
        return
    remedy = "On a machine without GPUs, set ACCELERATE_USE_CPU=true."
    if name != "WORLD_SIZE":
        remedy = "Start them with accelerate launch, torchrun, or scripts/launch_ray.py; for separate runs, set WORLD_SIZE=1."
    raise RunError(
        f"{count} processes were launched, by {name}, but each sees {seen}; they would train apart and write over each other. "
        f"{remedy}"
    )
