"""Call scripts/pretrain.py as on GPUs with FSDP2, which Accelerate does not offer on CPUs, with units small enough for tiny models.

ACCELERATE_TORCH_DEVICE=cpu accelerate launch --config_file accelerate_configs/fsdp2.yaml backends_on_cpu.py ...
"""

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mm_utils.run.start import run_script
from mm_utils.training import prepared as backends
from scripts import pretrain

PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign,assignment]
backends.MIN_BLOCK_PARAMETERS = 1000
run_script(pretrain.main)
