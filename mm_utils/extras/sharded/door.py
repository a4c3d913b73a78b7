"""What FSDP2 and DeepSpeed add to the core, see `mm_utils.doors`."""

_HERE = "mm_utils.extras.sharded.backends"
BACKENDS = {
    "FSDP": f"{_HERE}.configure_fsdp",
    "DEEPSPEED": f"{_HERE}.configure_deepspeed",
    "root": f"{_HERE}.initialise_fsdp_root",
}
"""By accelerate's name of a backend, what configures it; `root` is called with an objective that FSDP2 has sharded."""
