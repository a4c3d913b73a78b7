"""What a step should take on a GPU that is not at hand, reckoned, so that its first measurement can be judged.

    python -m benchmarks.expected --vision_config b32.json --text_config base --vocab_size 30522 --output_file expected.md

The step of `benchmarks.gpu` (contrastive, bf16, the same captions) runs once on tensors without memory, and each operation takes
the longer of its FLOPs by the rate of products and the bytes it reads and writes by the rate of a copy. The host needs
`--launch_us` for each; the step takes the longer of the two. Rates are those of one H100 in docs/benchmarks.md: 475 of 770 TFLOP/s
in the products of a step, 2.98 TB/s, 40 TFLOP/s of fp32. Left out are data, power limits and what fuses or splits kernels: a
measurement that is a quarter away has something to explain. Layer norms count double, as they run in fp32 on GPUs.
"""

import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu import captions
from benchmarks.host_reads import _VIEWS
from mm_utils.arguments import arg, parse_args
from mm_utils.copies import HostCopy
from mm_utils.extras.flops.counts import measure_flops
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.objectives.encoding import PASS_TOKENS
from mm_utils.objectives.grad_cache import backward
from mm_utils.objectives.losses import gather_batch, info_nce, tile_of
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table

ADAM_BYTES, CLIP_BYTES = 28, 12  # a parameter: four fp32 values read and three written; a gradient read, scaled
ADAM_LAUNCHES = 40


@dataclass
class ExpectedArguments:
    """What to reckon, and what the device is taken to reach."""

    pairs: str = arg("256,1024,4096", "Pairs of a step.")
    loss_pairs: str = arg("8192,32768", "Pairs of the loss alone, of width 512.")
    device: str = arg("H200", "Its name, for the heading.")
    peak_tflops: float = arg(770.0, "Of a large bf16 product; utilisation is by it.")
    tflops: float = arg(475.0, "Of the products of a step.")
    fp32_tflops: float = arg(40.0, "Of fp32 products, as in the loss.")
    bandwidth_tb: float = arg(4.2, "TB per second of a copy.")
    launch_us: float = arg(8.0, "Microseconds of the host for a launch.")
    output_file: str | None = arg(None, "Also write the table here.")


class Roofline(TorchDispatchMode):
    """Adds up what operations ask of a device.

    Attributes:
        seconds: by each operation's longer of FLOPs and bytes.
        flops, moved: FLOPs of products; bytes of all operations.
        launches: operations that are more than a view.
        peak: the most bytes that tensors had at a time.
    """

    def __init__(self, args: ExpectedArguments):
        super().__init__()
        self.args, self.seconds, self.flops, self.moved, self.launches = args, 0.0, 0, 0, 0
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [each for each in tree_iter(output) if isinstance(each, Tensor)]
        for tensor in made:
            self.hold(tensor)
        name = func.overloadpacket.__name__
        if name in _VIEWS or not made:
            return output
        used = [each for each in tree_iter((args, kwargs or {})) if isinstance(each, Tensor)]
        moved = sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in (*used, *made))
        moved *= 2 if name.startswith("native_layer_norm") else 1
        count = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))  # in place counts the same
        flops = count(*args, **(kwargs or {}), out_val=output) if count else 0
        rate = self.args.tflops if made[0].dtype == torch.bfloat16 else self.args.fp32_tflops
        self.add(flops, moved, 1, rate)
        return output

    def add(self, flops: int, moved: int, launches: int, rate: float = 1.0) -> None:
        """Add operations."""
        self.seconds += max(flops / rate, moved / self.args.bandwidth_tb) / 1e12
        self.flops, self.moved, self.launches = self.flops + flops, self.moved + moved, self.launches + launches

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's memory for as long as it lives."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def of_step(args: ExpectedArguments, model_args: ModelArguments, sizes: list[int]) -> list[dict[str, Any]]:
    """A row for each number of pairs."""
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    model = build_model(model_args, processor.tokenizer)
    if len(processor.tokenizer) < model_args.vocab_size:
        model.text_model.resize_token_embeddings(model_args.vocab_size)
    side = model_args.image_size or 224
    counted = measure_flops(model, side, 40)
    objective = build_objective(model, ObjectiveArguments("contrastive"), 0, processor.tokenizer).train()
    weights = sum(weight.numel() for weight in objective.parameters() if weight.requires_grad)
    accelerator, rows = Accelerator(cpu=True, mixed_precision="bf16"), []
    drawn = {pairs: captions(pairs, model_args.vocab_size) for pairs in sizes}
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.dict(PASS_TOKENS, cpu=PASS_TOKENS["cuda"]),  # texts in as many groups as there
        mock.patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", return_value=True),
        mock.patch.object(
            HostCopy, "numpy", lambda copy: np.zeros(copy._values.shape, dtype=bool)
        ),  # all pairs differ
    ):
        objective = objective._apply(torch.empty_like)
        for pairs, batch in drawn.items():
            lengths = batch["lengths"]
            batch |= {"pixel_values": torch.empty(pairs, 3, side, side), "ids": torch.arange(2 * pairs).view(pairs, 2)}
            with Roofline(args) as found:
                for weight in objective.parameters():
                    found.hold(weight)
                backward(accelerator, objective, batch, 0, None)
            found.add(0, (ADAM_BYTES + CLIP_BYTES) * weights, ADAM_LAUNCHES)
            objective.zero_grad()
            seconds = max(found.seconds, found.launches * args.launch_us / 1e6)
            model_flops = counted.training_step(pairs, lengths)
            rows.append(
                {
                    "what": "step", "pairs": pairs, "ms": 1e3 * seconds, "pairs/s": pairs / seconds,
                    "utilisation": model_flops / seconds / args.peak_tflops / 1e12, "TFLOP": found.flops / 1e12,
                    "GB moved": found.moved / 1e9, "launches": found.launches,
                    "ms of launches": found.launches * args.launch_us / 1e3, "peak GiB": (found.peak + 8 * weights) / 2**30,
                }
            )  # fmt: skip
    return rows


def of_loss(args: ExpectedArguments, pairs: int, width: int = 512) -> dict[str, Any]:
    """A row of the loss alone, in the tiles of a GPU."""
    tile = tile_of(pairs, pairs, torch.device("cuda"))
    with (
        FakeTensorMode(),
        mock.patch.object(HostCopy, "numpy", lambda copy: np.zeros(copy._values.shape, dtype=bool)),
        Roofline(args) as found,
    ):
        image_NE, text_NE = (normalize(torch.empty(pairs, width)).requires_grad_() for _ in range(2))
        batch = gather_batch(image_NE, text_NE, torch.arange(2 * pairs).view(pairs, 2))
        info_nce(image_NE, text_NE, torch.tensor(10.0, requires_grad=True), batch, tile).backward()
    return {
        "what": f"loss, tiles of {tile.rows} x {tile.columns}", "pairs": pairs,
        "ms": 1e3 * max(found.seconds, found.launches * args.launch_us / 1e6), "TFLOP": found.flops / 1e12,
        "GB moved": found.moved / 1e9, "launches": found.launches, "ms of launches": found.launches * args.launch_us / 1e3,
        "peak GiB": found.peak / 2**30,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its rows; `argv` lets tests and notebooks call it."""
    given = parse_args(ExpectedArguments, ModelArguments, argv=argv, doc=__doc__)
    args, model_args = given[ExpectedArguments], given[ModelArguments]
    rows = of_step(args, model_args, [int(pairs) for pairs in args.pairs.split(",")])
    rows += [of_loss(args, int(pairs)) for pairs in args.loss_pairs.split(",") if pairs]
    table = markdown_table(list(rows[0]), [[row.get(name) for name in rows[0]] for row in rows])
    said = f"{table}\n\n{args.device}: {args.tflops:g} of {args.peak_tflops:g} TFLOP/s, {args.bandwidth_tb:g} TB/s\n"
    sys.stdout.write(said)
    if args.output_file:
        Path(args.output_file).write_text(said, encoding="utf-8")
    return rows


if __name__ == "__main__":
    run_script(main)
