"""What a training step is made of on a GPU: time, utilisation, launches and waits, beside a plain loop.

    accelerate launch --config_file accelerate_configs/single_gpu.yaml -m benchmarks.gpu
    python -m benchmarks.gpu --quarter_hour pairs.jsonl                                            # all there is to know of a GPU
    python -m benchmarks.gpu --pairs 16 --vision_config tiny --text_config tiny --image_size 32   # a trial on a CPU

Each setting takes steps of the real `TrainStep` on random pixels and captions of about 13 tokens, which stay on the device, so no
loader takes part. `bare` is the loop one would write: both encoders once, captions padded to the longest, two cross-entropies of the
whole matrix of logits, the same optimizer and clipping, and one `.item()` a step. The loss of the last step, from equal weights and
batches, shows what a precision or compiling changes.

`--changes` adds a row for each of these, with one thing changed: a patch of a library left out, or `packed`, texts end to end through
the text tower in place of groups of about one length, which CPUs do by themselves.

`--quarter_hour` takes pairs of one's own, 2,000 or more, and runs in order of value a real run from photographs, a second one from its
model, frozen, whose bars show how fast features are cached, this step beside the bare loop, and with each change, the loops of peers,
`tests/gpu`, fp16 and the loss alone: each is a process with a limit of its own, and prints what it has.

Milliseconds are the median of `--rounds` turns of `--steps` steps. Utilisation is the FLOPs of both encoders for real tokens, by the
rate of a bf16 matrix product of 8192 x 8192 measured in the same run. Busy is the share of the step in which a kernel runs,
matmul the share of matrix products in that, launches and waits are calls of CUDA's runtime, all by torch's profiler. A setting
that does not fit into memory is a row with its error; the table is printed again after every row.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import (
    MODEL_FLAGS,
    ROOT,
    add_model_flags,
    device_name,
    flags_of,
    give_memory_back,
    model_arguments,
    names,
    numbers,
    print_table,
    synchronize,
)
from mm_utils.model import build, compile, encoding, packing, short_attention
from mm_utils.model.arguments import ModelArguments, ObjectiveArguments
from mm_utils.model.build import build_model
from mm_utils.model.compile import compile_layers
from mm_utils.model.processor import load_processor
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.grad_cache import TooManyPairsError, is_out_of_memory
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import OptimizerArguments, TrainingArguments
from mm_utils.training.memory import peak_bytes, reset_peak
from mm_utils.training.optim import build_optimizer
from mm_utils.training.stages import stages_of
from mm_utils.training.step import TrainStep

Step = Callable[[int], Any]

CHANGES: dict[str, Callable[[torch.device], AbstractContextManager[Any]]] = {
    "packed": lambda device: mock.patch.object(packing, "PACKED_ON", packing.PACKED_ON ^ {device.type}),
    "short_attention": lambda device: mock.patch.object(short_attention, "MOST_TOKENS", 0),
    "known_padding": lambda device: mock.patch.object(
        encoding, "masked", lambda make, *given, **named: make(*given, **named)
    ),
    "patch_product": lambda device: mock.patch.object(build, "multiply_patches"),
    "first_call": lambda device: mock.patch.object(
        compile, "_first_call", lambda layer, call, *given, **named: call(*given, **named)
    ),
}
"""One thing other than it is, for the time of a setting."""

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
PRODUCTS = ("gemm", "cutlass", "nvjet", "xmma")  # in the names of kernels that multiply matrices
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def captions(pairs: int, vocabulary: int) -> dict[str, Any]:
    """Random captions as long as COCO's (13 ± 3 tokens, 7 to 40), longest first, as the collator pads them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(pairs, generator=generator).mul(3).add(13).round().clamp(7, 40).int()
    lengths = sorted(drawn.tolist(), reverse=True)
    mask = (torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]).long()
    words = torch.randint(5, vocabulary, mask.shape, generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask, "lengths": lengths}


def random_batch(pairs: int, vocabulary: int, image_size: int, device: torch.device) -> dict[str, Any]:
    """A batch of pairs that are all different, on the device."""
    batch = captions(pairs, vocabulary) | {
        "pixel_values": torch.randn(pairs, 3, image_size, image_size, generator=torch.Generator().manual_seed(1)),
        "ids": torch.arange(2 * pairs).view(pairs, 2),
        "rows": torch.arange(pairs),
    }
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return batch | {"image_ids": [str(row) for row in range(pairs)], "skipped": [], "skipped_ids": []}


def bare_step(accelerator: Accelerator, model: Any, optimizer: Any, batch: dict[str, Any]) -> Step:
    """The contrastive loop one would write for one device."""
    target = torch.arange(len(batch["lengths"]), device=accelerator.device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def step(number: int) -> float:
        with accelerator.autocast():
            image, _ = model.encode_image(batch["pixel_values"], with_keys_values=False)
            text, _ = model.encode_text(batch["input_ids"], batch["attention_mask"], with_states=False)
        image = image.float()
        text = text.float()
        logits = model.logit_scale.exp() * image @ text.T
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def make_step(
    accelerator: Accelerator,
    setting: dict[str, Any],
    model_args: ModelArguments,
    words: int,
    micro_batch_size: str | None,
) -> tuple[Step, float]:
    """The step of one setting, and the FLOPs of both encoders in it."""
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    torch.manual_seed(0)
    model = build_model(model_args, processor.tokenizer)
    if setting["compiled"]:
        compile_layers(model)
    if len(processor.tokenizer) < words:
        model.text_model.resize_token_embeddings(words)
    image_size = model_args.image_size or 224
    vocabulary = max(len(processor.tokenizer), words)
    optimizer_args = OptimizerArguments(warmup_ratio=0.0)  # the bare loop's rate
    objective = build_objective(model, ObjectiveArguments(setting["objectives"]), 0)
    model.to(accelerator.device)
    batch = random_batch(setting["pairs"], vocabulary, image_size, accelerator.device)
    operations = count_flops(model, batch)
    optimizer = build_optimizer(model, optimizer_args, pretrained=False, device=accelerator.device)
    if setting["loop"] == "bare":
        model.train()
        return bare_step(accelerator, model, accelerator.prepare(optimizer), batch), operations
    objective, optimizer = accelerator.prepare(objective, optimizer)
    args = TrainingArguments(
        output_dir="unused", max_steps=10**6, global_batch_size=setting["pairs"], micro_batch_size=micro_batch_size
    )
    [stage] = stages_of(accelerator.unwrap_model(objective), args, 0.0, 10**6)  # all terms in a step
    train_step = TrainStep(args, optimizer_args, accelerator, objective, optimizer, stage)

    def step(number: int) -> Tensor:
        report = train_step.run(batch, number)
        setting["held"] = train_step.micro_batch_size
        return report["loss"]

    return step, operations


@torch.no_grad()
def count_flops(model: Any, batch: dict[str, Any]) -> float:
    """FLOPs of both encoders in a step, for real tokens; a backward pass counts as two forward passes."""
    length = round(sum(batch["lengths"]) / len(batch["lengths"]))
    model.eval()
    eager = torch.compiler.set_stance("force_eager")  # compiled code cannot be counted
    with eager, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.encode_image(batch["pixel_values"][:1], with_keys_values=False)
        model.encode_text(batch["input_ids"][:1, :length], batch["attention_mask"][:1, :length], with_states=False)
    return 3.0 * counter.get_total_flops() * len(batch["lengths"])


def profile(step: Step, device: torch.device, milliseconds: float) -> dict[str, float]:
    """Busy share, launches and waits of a step, by torch's profiler."""
    with torch.profiler.profile() as profiler:
        for number in range(3):
            step(number)
        synchronize(device)
    events = profiler.key_averages()
    kernels = {
        event.key.lower(): event.self_device_time_total
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation  # a span around kernels that are counted
    }
    busy = sum(kernels.values()) / 3e3
    products = sum(time for name, time in kernels.items() if any(part in name for part in PRODUCTS)) / 3e3
    launches, waits = (sum(e.count for e in events if e.key in known) / 3 for known in (LAUNCHES, WAITS))
    return {
        "busy": busy / milliseconds,
        "matmul": products / busy if busy else 0.0,
        "launches": launches,
        "waits": waits,
    }


def measure(accelerator: Accelerator, setting: dict[str, Any], args: argparse.Namespace, peak: float) -> None:
    """Add the figures of one setting to it; `start s` are the first three steps, which compile and are not counted."""
    torch._dynamo.reset()
    reset_peak(accelerator.device)
    step, operations = make_step(accelerator, setting, model_arguments(args), args.vocab_size, args.micro_batch_size)
    begin = time.perf_counter()
    for number in range(3):
        step(number)
    synchronize(accelerator.device)
    setting["start s"] = time.perf_counter() - begin
    times: list[float] = []
    loss: Any = None
    for _ in range(args.rounds):
        synchronize(accelerator.device)
        begin = time.perf_counter()
        for number in range(args.steps):
            loss = step(number)
        synchronize(accelerator.device)
        times.append((time.perf_counter() - begin) / args.steps)
    seconds = median(times)
    setting |= {"ms a step": 1e3 * seconds, "pairs/s": setting["pairs"] / seconds}
    setting |= {
        "utilisation": operations / seconds / peak,
        "peak GiB": peak_bytes(accelerator.device) / 2**30,
        "loss": float(loss),
    }
    if accelerator.device.type == "cuda":
        setting |= profile(step, accelerator.device, 1e3 * seconds)


def ceilings(device: torch.device) -> tuple[float, float]:
    """FLOPs a second of a large bf16 matrix product, bytes a second of a large copy."""
    side = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(side * side * 8, device=device)
    target = torch.empty_like(source)

    def seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(13):
            synchronize(device)
            begin = time.perf_counter()
            work()
            synchronize(device)
            times.append(time.perf_counter() - begin)
        return median(times[3:])

    return 2 * side**3 / seconds(lambda: left @ right), 2 * source.nbytes / seconds(lambda: target.copy_(source))


def quarter_hour(args: argparse.Namespace) -> None:
    """Run the sections, each a process that is ended after its seconds."""
    folder = Path(tempfile.mkdtemp())
    (folder / "b32.json").write_text(json.dumps({"model_type": "vit", "patch_size": 32, "image_size": 224}))
    chosen = {"vision_config": folder / "b32.json", "text_config": "base"}
    chosen |= {name: getattr(args, name) for name in MODEL_FLAGS if getattr(args, name) is not None}
    model = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    words = [*model, "--vocab_size", str(args.vocab_size)]
    few = str(args.pairs[0])
    pairs = ",".join(map(str, args.pairs))
    real = f"scripts/pretrain.py --objectives contrastive --fusion_layers 0 --global_batch_size {few} --max_steps 100".split()
    photographs = ["--train_file", str(Path(args.quarter_hour).resolve())]
    real += [*model, *photographs, "--output_dir", str(folder / "run")]
    frozen = f"scripts/pretrain.py --model_name_or_path {folder / 'run'} --freeze_vision --freeze_text --cache_features".split()
    frozen += [*photographs, "--output_dir", str(folder / "frozen")]
    bare = ["-m", "benchmarks.gpu", "--objectives", "contrastive", *words, "--pairs"]
    peers = f"-m benchmarks.training --synthetic 32 --batch_size {few} --rounds 2 --steps 4".split()
    peers += [*words, *photographs, "--contestants", "tandem,open_clip_bucketed,open_clip,transformers"]
    tests = ["-m", "pytest", "-q", "-n", "4", "--dist", "worksteal", "tests/gpu", "tests/model/test_compile.py"]
    sections: dict[str, tuple[int, str, list[str]]] = {
        "real": (150, "bf16", real),
        "frozen": (90, "bf16", frozen),  # what `real` has saved, its features cached
        "bare": (210, "bf16", [*bare, pairs]),
        "changes": (
            150,
            "bf16",
            [*bare, few, "--loops", "tandem", "--compiled", "true", "--changes", ",".join(CHANGES)],
        ),
        "peers": (150, "bf16", peers),
        "tests": (110, "bf16", tests),
        "fp16": (60, "fp16", [*bare, few, "--compiled", "false"]),
        "loss": (30, "bf16", f"-m benchmarks.loss --pairs {32 * args.pairs[0]}".split()),
    }
    for name in args.sections or sections:
        limit, precision, command = sections[name]
        sys.stdout.write(f"\n== {name}: {limit} s at most\n")
        sys.stdout.flush()
        environment = os.environ | {"ACCELERATE_MIXED_PRECISION": precision, "HF_HUB_OFFLINE": "1"}
        begin = time.perf_counter()
        ended = "cut off"
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, timeout=limit, check=False)
            ended = f"exit status {done.returncode}"
        sys.stdout.write(f"== {name}: {ended} after {time.perf_counter() - begin:.0f} s\n")
        sys.stdout.flush()


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument("--pairs", type=numbers, default=[1024, 4096], help="pairs per step")
    parser.add_argument("--objectives", default="contrastive/contrastive,captioning", help="a slash between settings")
    parser.add_argument(
        "--compiled", type=names(["false", "true"]), default="false,true", help="--torch_compile or not"
    )
    parser.add_argument(
        "--loops", type=names(["tandem", "bare"]), default="tandem,bare", help="bare: contrastive alone"
    )
    parser.add_argument("--changes", type=names([*CHANGES]), default=[], help=f"some of {','.join(CHANGES)}")
    parser.add_argument("--micro_batch_size", help="pairs held at a time, or auto, as in scripts/pretrain.py")
    parser.add_argument("--rounds", type=int, default=3, help="turns")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--quarter_hour", metavar="PAIRS", help="pairs, as in scripts/pretrain.py --train_file")
    parser.add_argument(
        "--sections", nargs="*", default=[], help="of --quarter_hour: real frozen bare changes peers tests fp16 loss"
    )
    add_model_flags(parser)
    args = parser.parse_args(argv)
    if args.quarter_hour:
        quarter_hour(args)
        return []
    accelerator = make_accelerator()
    peak, copied = ceilings(accelerator.device)
    about = f"{device_name(accelerator.device)}, {accelerator.mixed_precision}: a product reaches {peak / 1e12:.0f} TFLOP/s, "
    rows: list[dict[str, Any]] = []
    for pairs, objectives, compiled, loop, change in product(
        args.pairs, args.objectives.split("/"), args.compiled, args.loops, ["", *args.changes]
    ):
        if loop == "bare" and (objectives != "contrastive" or change):
            continue
        row = {"loop": loop, "objectives": objectives, "pairs": pairs, "compiled": compiled == "true"}
        if args.changes:
            row["changed"] = change
        rows.append(row)
        try:
            with CHANGES[change](accelerator.device) if change else nullcontext():
                measure(accelerator, row, args, peak)
        except (RuntimeError, TooManyPairsError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            row["error"] = str(error).split(".")[0]
        print_table(rows, [f"{about}a copy {copied / 1e12:.2f} TB/s"])
        accelerator.free_memory()
        give_memory_back(accelerator.device)
    return rows


if __name__ == "__main__":
    main()
