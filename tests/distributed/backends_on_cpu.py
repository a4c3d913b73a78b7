"""Call a script as on GPUs with FSDP2, which Accelerate does not offer on CPUs, with units small enough for tiny models.

ACCELERATE_TORCH_DEVICE=cpu accelerate launch --config_file accelerate_configs/fsdp2.yaml fsdp2_on_cpu.py pretrain ...
"""

import importlib
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mm_utils.run.start import run_script
from mm_utils.training import prepared as backends

PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign,assignment]
backends.MIN_BLOCK_PARAMETERS = 1000
run_script(importlib.import_module(f"scripts.{sys.argv.pop(1)}").main)
