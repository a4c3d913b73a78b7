"""A step reads nothing of its device between its ends."""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu
from mm_utils.model.arguments import ModelArguments

READING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}
_INDEXING = {"index", "index_put", "index_put_"}


class HostReads(TorchDispatchMode):
    """Count in `found`, within a `with` block, how often a line, as `file.py:function`, reads a value of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __enter__(self) -> "HostReads":
        tolist = self._tolist = torch.Tensor.tolist

        def counted(tensor):  # of a CPU's tensor, it is not an operation
            self._count()
            return tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign, assignment]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in READING or by_mask:
            self._count()
        return func(*args, **(kwargs or {}))

    def _count(self) -> None:
        frame = sys._getframe(2)
        while frame is not None and not re.search("(mm_utils|transformers|accelerate)/", frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or frame.f_code.co_name != "to_device":
            place = "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
            self.found[place] += 1


@pytest.mark.parametrize("objectives", ["contrastive", "contrastive,captioning", "contrastive,matching"])
def test_a_step_waits_for_its_device_at_its_ends(objectives):
    """A read between them would drain a GPU's queue; a change that adds one must be seen here."""
    setting = {"loop": "tandem", "objectives": objectives, "pairs": 12, "compiled": False}
    sizes = ModelArguments(vision_config="tiny", text_config="tiny", image_size=32)
    step, _ = gpu.make_step(gpu.make_accelerator(), setting, sizes, 100, None)
    step(10**6 - 2)  # of the head's stage, where there is one
    with HostReads() as reads:
        step(10**6 - 1)
    of_cpu = {"optimizer.py:step"}  # which a fused one, as on a GPU, does not read
    assert set(reads.found) - of_cpu == {"losses.py:call_roll", "skipped.py:may_move"}, reads.found
