"""Measure what a training step is made of on a GPU: time, utilisation, launches, waits.

    accelerate launch --config_file accelerate_configs/single_gpu.yaml -m benchmarks.gpu --output_file gpu.json
    accelerate launch -m benchmarks.gpu --pairs 16 --vision_config tiny --text_config tiny --image_size 32   # a trial on a CPU

Each setting of `--pairs`, `--objectives_tried` and `--compiled` takes steps of the real `TrainStep` on random pixels and captions
of about 13 tokens (a normal distribution, deviation 3, cut to 7 to 40) that stay on the device, so no loader takes part.
`--micro_batch_size auto` finds the size as `pretrain` does. `bare` is the loop one
would write: both towers once, captions padded to the longest, two cross-entropies of the whole matrix of logits, the same fused
AdamW and clipping, and one `.item()` a step. The loss of the last step, from equal weights and batches, shows what a precision or
compiling changes.

Milliseconds are the median of `--rounds` turns of `--steps` steps. Utilisation is model FLOPs of real tokens
(`mm_utils.extras.flops.counts`) by the rate of a bf16 matrix product of 8192 x 8192 measured in the same run. Busy is the share of the
step in which a kernel runs, matmul the share of matrix products in that, launches and waits are calls of CUDA's runtime, all by
torch's profiler, which slows a step down; the log has the kernels' names.
Kernels and reads need no GPU (`benchmarks.host_reads`): operations that are more than a view, and values that the host waits for
with all that was launched before them; a value that it asked for earlier is none. Compiled rows have neither, because counting
runs the uncompiled code. A setting that does not fit into memory is a row with its error; the table is written after every row.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from benchmarks.half_hour import run_half_hour
from benchmarks.harness import device_name, give_memory_back, machine, synchronize
from benchmarks.host_reads import HostReads
from mm_utils.arguments import arg, parse_args
from mm_utils.extras.flops.counts import measure_flops
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.objectives.encoding import length_groups
from mm_utils.objectives.grad_cache import TooManyPairsError, is_out_of_memory
from mm_utils.run.start import make_accelerator, run_script
from mm_utils.text import markdown_table
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.memory import peak_bytes, reset_peak
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from mm_utils.training.step import TrainStep

logger = logging.getLogger(__name__)

Step = Callable[[int], Any]

MATRIX = 8192
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
PRODUCTS = ("gemm", "cutlass", "nvjet", "xmma")  # in the names of kernels that multiply matrices
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COLUMNS = {
    "loop": "loop", "objectives": "objectives", "pairs": "pairs", "compiled": "compiled", "milliseconds": "ms a step",
    "pairs_per_second": "pairs/s", "utilisation": "utilisation", "peak_gib": "peak GiB", "loss": "loss", "busy": "busy",
    "products": "matmul",
    "launches": "launches", "waits": "waits", "kernels": "kernels", "reads": "reads", "groups": "text groups", "held": "held",
}  # fmt: skip


@dataclass
class GpuBenchmarkArguments:
    """What to measure."""

    pairs: str = arg("256,1024", "Pairs per step.")
    objectives_tried: str = arg("contrastive/contrastive,captioning", "Values of --objectives, with a slash between.")
    compiled: str = arg("false,true", "With and without --torch_compile.")
    loops: str = arg(
        "tandem,bare",
        "tandem is this project's step; bare, for contrastive alone, a plain one.",
    )
    micro_batch_size: str | None = arg(None, "Pairs held at a time, or auto, as in pretrain.")
    rounds: int = arg(3, "Turns.")
    steps: int = arg(10, "Steps of a turn.")
    profiled: bool = arg(True, "Also profile three steps of each setting.")
    output_file: str | None = arg(None, "Write all figures to this JSON file, and the table beside it (.md).")
    half_hour: bool = arg(
        False,
        "Run every measurement that a GPU is wanted for, into --output_file (gpu.json): benchmarks/half_hour.py.",
    )
    tiny: bool = arg(False, "With --half_hour, take tiny shapes and few steps, to rehearse on any machine.")


def captions(pairs: int, vocabulary: int) -> dict[str, Any]:
    """Random captions of COCO-like lengths, longest first, as the collator pads them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(pairs, generator=generator).mul(3).add(13).round().clamp(7, 40).int()
    lengths = sorted(drawn.tolist(), reverse=True)
    mask = (torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]).long()
    words = torch.randint(5, vocabulary, mask.shape, generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask, "lengths": lengths}


def random_batch(pairs: int, vocabulary: int, image_size: int, device: torch.device) -> dict[str, Any]:
    """A batch of pairs that are all different, on the device."""
    batch = captions(pairs, vocabulary) | {
        "pixel_values": torch.randn(pairs, 3, image_size, image_size),
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
        image, text = image.float(), text.float()
        logits = model.logit_scale.exp() * image @ text.T
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def make_step(
    accelerator: Accelerator, setting: dict[str, Any], model_args: ModelArguments, micro_batch_size: str | None
) -> tuple[Step, float]:
    """The step of one setting, and the model FLOPs of it."""
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    torch.manual_seed(0)
    model_args.torch_compile = setting["compiled"]
    model = build_model(model_args, processor.tokenizer)
    if len(processor.tokenizer) < model_args.vocab_size:
        model.text_model.resize_token_embeddings(model_args.vocab_size)
    image_size, vocabulary = model_args.image_size or 224, max(len(processor.tokenizer), model_args.vocab_size)
    objective_args = ObjectiveArguments(setting["objectives"])
    optimizer_args = OptimizerArguments(warmup_ratio=0.0, head_share=0.0)  # the bare loop's rate; all terms in a step
    joint = build_objective(model, objective_args, 0, processor.tokenizer)
    flops = measure_flops(model, image_size, 40)
    model.to(accelerator.device)
    batch = random_batch(setting["pairs"], vocabulary, image_size, accelerator.device)
    lengths, scored = batch["lengths"], joint.pairs_per_image * setting["pairs"]
    operations = flops.training_step(len(lengths), lengths, scored, round(sum(lengths) / len(lengths)))
    if setting["loop"] == "tandem":
        setting["groups"] = len(length_groups(lengths, accelerator.device.type))
    optimizer = build_optimizer(model, optimizer_args, pretrained=False, device=accelerator.device)
    if setting["loop"] == "bare":
        model.to(accelerator.device).train()
        return bare_step(accelerator, model, accelerator.prepare(optimizer), batch), operations
    objective, optimizer = accelerator.prepare(joint, optimizer)
    args = TrainingArguments(
        output_dir="unused", max_steps=10**6, global_batch_size=setting["pairs"], micro_batch_size=micro_batch_size
    )
    train_step = TrainStep(args, optimizer_args, accelerator, objective, optimizer, 10**6, 40)

    def step(number: int) -> dict[str, Tensor]:
        report = train_step.run(batch, number)
        train_step.finish()
        setting["held"] = train_step.micro_batch.size
        return report

    return step, operations


def profile(step: Step, device: torch.device, milliseconds: float) -> dict[str, float]:
    """Busy share, launches and waits of a step, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(3):
            step(number)
        synchronize(device)
    events = profiler.key_averages()
    table = events.table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70)
    logger.info("%s", table)
    kernels = {
        event.key.lower(): event.self_device_time_total
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation  # a span around kernels that are counted
    }
    busy = sum(kernels.values()) / 3e3
    products = sum(time for name, time in kernels.items() if any(part in name for part in PRODUCTS)) / 3e3
    count = {
        name: sum(e.count for e in events if e.key in names) / 3
        for name, names in (("launches", LAUNCHES), ("waits", WAITS))
    }
    return {"busy": busy / milliseconds, "products": products / busy if busy else 0.0, **count}


def measure(
    accelerator: Accelerator,
    setting: dict[str, Any],
    args: GpuBenchmarkArguments,
    model_args: ModelArguments,
    peak: float,
) -> dict[str, Any]:
    """The figures of one setting; the first three steps, which compile, are not counted."""
    torch._dynamo.reset()
    reset_peak(accelerator.device)
    step, operations = make_step(accelerator, setting, model_args, args.micro_batch_size)
    begin = time.perf_counter()
    for number in range(3):
        step(number)
    synchronize(accelerator.device)
    setting["start_seconds"] = time.perf_counter() - begin
    times: list[float] = []
    last: Any = None
    for _ in range(args.rounds):
        begin = time.perf_counter()
        for number in range(args.steps):
            last = step(number)
        synchronize(accelerator.device)
        times.append((time.perf_counter() - begin) / args.steps)
    seconds = median(times)
    setting |= {"milliseconds": 1e3 * seconds, "slowest": 1e3 * max(times), "fastest": 1e3 * min(times)}
    setting |= {"pairs_per_second": setting["pairs"] / seconds, "utilisation": operations / seconds / peak}
    setting |= {"tflop": operations / 1e12, "peak_gib": peak_bytes(accelerator.device) / 2**30}
    setting["loss"] = float(last if setting["loop"] == "bare" else last["loss"])
    if not setting["compiled"]:  # the count would run the graph's source instead
        with HostReads() as reads:
            step(args.rounds * args.steps)
        reads.found.pop("optimizer.py:step", None)  # of AdamW that is not fused, whose counts of steps lie on the host
        setting |= {"kernels": reads.kernels, "reads": sum(reads.found.values())}
    return setting | (profile(step, accelerator.device, 1e3 * seconds) if args.profiled else {})


def ceilings(device: torch.device) -> dict[str, float]:
    """FLOPs a second of a large bf16 matrix product, bytes a second of a large copy."""
    side = MATRIX if device.type == "cuda" else 512
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(13):
            synchronize(device)
            begin = time.perf_counter()
            work()
            synchronize(device)
            times.append(time.perf_counter() - begin)
        return median(times[3:])

    source = torch.randn(side * side * 8, device=device)
    target = torch.empty_like(source)
    product_seconds, copy_seconds = seconds(lambda: left @ right), seconds(lambda: target.copy_(source))
    return {"flops": 2 * side**3 / product_seconds, "bytes": 2 * source.nbytes / copy_seconds}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its results; `argv` lets tests and notebooks call it."""
    given = parse_args(GpuBenchmarkArguments, ModelArguments, argv=argv, doc=__doc__)
    args, model_args = given[GpuBenchmarkArguments], given[ModelArguments]
    if args.half_hour:
        return run_half_hour(Path(args.output_file or "gpu.json"), args.tiny)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    accelerator = make_accelerator()
    name = device_name(accelerator.device)
    ceiling = ceilings(accelerator.device)
    logger.info("%s: %.0f TFLOP/s, %.2f TB/s", name, ceiling["flops"] / 1e12, ceiling["bytes"] / 1e12)
    settings = product(
        args.pairs.split(","), args.objectives_tried.split("/"), args.compiled.split(","), args.loops.split(",")
    )
    ceiling_text = f"{ceiling['flops'] / 1e12:.0f} TFLOP/s, {ceiling['bytes'] / 1e12:.2f} TB/s"
    about = machine() | {"device": name, "precision": accelerator.mixed_precision, "ceiling": ceiling_text}
    results: list[dict[str, Any]] = []
    for pairs, objectives, compiled, loop in settings:
        if loop == "bare" and objectives != "contrastive":
            continue
        setting = {"loop": loop, "objectives": objectives, "pairs": int(pairs), "compiled": compiled == "true"}
        try:
            setting = measure(accelerator, setting, args, model_args, ceiling["flops"])
        except (RuntimeError, TooManyPairsError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            setting["error"] = str(error).split(".")[0]
        logger.info("%s", json.dumps(setting))
        results.append(setting)
        write_table(results, about, args.output_file)
        accelerator.free_memory()
        give_memory_back(accelerator.device)
    sys.stdout.write(table_text(results, about))
    return results


def table_text(results: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The table, and the machine that it was measured on."""
    cells = [[result.get(column) for column in COLUMNS] for result in results]
    errors = [f"\n- {row['loop']}, {row['pairs']} pairs: {row['error']}" for row in results if "error" in row]
    table = markdown_table(list(COLUMNS.values()), cells)
    return f"{table}\n{''.join(errors)}\n{'; '.join(f'{what}: {value}' for what, value in about.items())}\n"


def write_table(results: list[dict[str, Any]], about: dict[str, str], file: str | None) -> None:
    """Write the figures so far to `file` and the table beside it."""
    if file:
        Path(file).write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n", encoding="utf-8")
        Path(file).with_suffix(".md").write_text(table_text(results, about), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
