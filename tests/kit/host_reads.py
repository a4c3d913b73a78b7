"""Count, without a GPU, what a step asks of one: operations, and values the host waits for.

An operation counts where it reaches torch's kernels, so within autograd's and transformers' code too. A read drains the queue: its
value comes after all that was launched before. One that was asked for earlier, by `mm_utils.copies.HostCopy`, does not.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mm_utils import copies

READING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}
_INDEXING = {"index", "index_put", "index_put_"}
_VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
    "split_with_sizes", "detach", "alias", "as_strided", "unbind", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "lift_fresh", "_reshape_alias", "diagonal", "_local_scalar_dense",
}  # fmt: skip


class HostReads(TorchDispatchMode):
    """Count within a `with` block.

    Attributes:
        kernels: operations that are more than a view.
        found: how often each line, as `file.py:function`, read a value; the innermost one of this project or a library.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.found: Counter[str] = Counter()

    def __enter__(self) -> "HostReads":
        tolist = self._tolist = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:  # of a CPU's tensor, it is not an operation
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
        self.kernels += name not in _VIEWS
        return func(*args, **(kwargs or {}))

    def _count(self) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and not _is_named(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename != copies.__file__:
            place = "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
            self.found[place] += 1


def _is_named(file: str) -> bool:
    return any(f"{name}/" in file for name in ("mm_utils", "transformers", "accelerate"))
