"""What a step should take on a GPU that is not at hand, reckoned from its operations and bytes, so that a measurement can be judged.

    python -m benchmarks.expected --vision_config b32.json --text_config base --vocab_size 30522

The step of `benchmarks.gpu` (contrastive, bf16, the same captions) runs once on tensors without memory. Each operation takes the longer
of its FLOPs by the rate of products and the bytes it reads and writes by the rate of a copy; the host needs `--launch_us` for each. The
step takes the longer of the two sums. Rates are those of one H100 in docs/benchmarks.md, but for the bandwidth, which is an H200's. Left
out are data, power limits and what fuses or splits kernels: a measurement that is a quarter away has something to explain.
"""

import argparse
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu import captions
from benchmarks.harness import add_model_flags, flags_of, model_arguments, numbers, print_table
from mm_utils.copies import HostCopy
from mm_utils.model.build import build_model
from mm_utils.model.encoding import PASS_TOKENS
from mm_utils.model.processor import load_processor
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.objectives.grad_cache import backward

ADAM_BYTES = 28 + 12  # a parameter: four fp32 values read and three written; for clipping a gradient read, and scaled
ADAM_LAUNCHES = 40
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
    "split_with_sizes", "detach", "alias", "as_strided", "unbind", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "lift_fresh", "_reshape_alias", "diagonal", "_local_scalar_dense",
}  # fmt: skip


class Roofline(TorchDispatchMode):
    """Adds up what operations ask of a device: seconds, FLOPs of products, bytes and launches."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.args, self.seconds, self.flops, self.moved, self.launches = args, 0.0, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [value for value in tree_iter(output) if isinstance(value, Tensor)]
        name = func.overloadpacket.__name__
        if name in VIEWS or not made:
            return output
        used = [value for value in tree_iter((args, kwargs or {})) if isinstance(value, Tensor)]
        moved = sum(min(value.nbytes, value.untyped_storage().nbytes()) for value in (*used, *made))
        moved *= 2 if name.startswith("native_layer_norm") else 1  # it runs in fp32 on GPUs
        count = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))  # in place counts the same
        flops = count(*args, **(kwargs or {}), out_val=output) if count else 0
        self.add(flops, moved, 1, self.args.tflops if made[0].dtype == torch.bfloat16 else self.args.fp32_tflops)
        return output

    def add(self, flops: int, moved: int, launches: int, rate: float = 1.0) -> None:
        """Add operations."""
        self.seconds += max(flops / rate, moved / self.args.bandwidth_tb) / 1e12
        self.flops, self.moved, self.launches = self.flops + flops, self.moved + moved, self.launches + launches


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument("--pairs", type=numbers, default=[256, 1024, 4096], help="pairs of a step")
    for name, value in (
        ("tflops", 475),
        ("fp32_tflops", 40),
        ("peak_tflops", 770),
        ("bandwidth_tb", 4.2),
        ("launch_us", 8),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help="what the device is taken to reach")
    add_model_flags(parser)
    args = parser.parse_args(argv)
    model_args = model_arguments(args)
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    model = build_model(model_args, processor.tokenizer)
    if len(processor.tokenizer) < args.vocab_size:
        model.text_model.resize_token_embeddings(args.vocab_size)
    side = model_args.image_size or 224
    objective = build_objective(model, ObjectiveArguments("contrastive"), 0, processor.tokenizer).train()
    weights = sum(weight.numel() for weight in objective.parameters() if weight.requires_grad)
    accelerator, rows = Accelerator(cpu=True, mixed_precision="bf16"), []
    drawn = {pairs: captions(pairs, args.vocab_size) for pairs in args.pairs}
    all_differ = mock.patch.object(HostCopy, "numpy", lambda copy: np.zeros(copy._values.shape, dtype=bool))
    as_on_gpus = mock.patch.dict(PASS_TOKENS, cpu=PASS_TOKENS["cuda"])  # texts in as many groups as there
    swaps = mock.patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", return_value=True)
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpus, swaps, all_differ:
        objective = objective._apply(torch.empty_like)
        for pairs, batch in drawn.items():
            batch |= {"pixel_values": torch.empty(pairs, 3, side, side), "ids": torch.arange(2 * pairs).view(pairs, 2)}
            with Roofline(args) as found:
                backward(accelerator, objective, batch, 0, None)
            found.add(0, ADAM_BYTES * weights, ADAM_LAUNCHES)
            objective.zero_grad()
            launching = found.launches * args.launch_us / 1e6
            seconds = max(found.seconds, launching)
            rows.append({"pairs": pairs, "ms": 1e3 * seconds, "pairs/s": pairs / seconds, "TFLOP": found.flops / 1e12})
            rows[-1] |= {"utilisation": found.flops / seconds / args.peak_tflops / 1e12, "GB moved": found.moved / 1e9}
            rows[-1] |= {"launches": found.launches, "ms of launches": 1e3 * launching}
    print_table(rows)
    return rows


if __name__ == "__main__":
    main()
