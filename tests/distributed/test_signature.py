"""The signature: hardware only changes the speed.

Four steps on the embedded data set, in fp32, with all defaults, from small backbones with dropout in their configs and from stock
models, on 1, 2 and 4 processes, with the local batch in 1, 2 and 4 parts, straight through or continued after step 2 by another
number of processes: all of them see the same rows in the same order, and end with the same parameters, temperature and bias
included. The run of all terms also has rows with negatives.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, List, Value
from safetensors.torch import load_file
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.data.arguments import DataArguments, LoaderArguments
from mm_utils.data.batches.loaders import DeviceLoader, make_loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.model.arguments import ModelArguments, ObjectiveArguments
from mm_utils.model.build import build_model
from mm_utils.model.processor import load_processor
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.negatives import NEGATIVE_IDS, Negatives
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import OptimizerArguments, TrainingArguments
from mm_utils.training.optim import NEW_RATE, OPTIMIZERS, build_optimizer
from mm_utils.training.trainer import Trainer, Training
from tests.kit.processes import let_accelerate_find_ranks, run_on_ranks
from tests.kit.stock_folders import write_stock

STEPS = 4
STOP = 2
BATCH = 16
TOLERANCE = 1e-5
# An epsilon far below the gradients would divide rounding by rounding: where a gradient is zero but for the last digits,
# those digits would choose the direction of a whole step.
OPTIMIZERS["smooth_adamw"] = (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-3})
ADAM = OptimizerArguments(optim="smooth_adamw")
TEXT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # fmt: skip
VISION = {**TEXT, "model_type": "vit", "patch_size": 8, "image_size": 32}
PARTS = (1, 2, 4)
OBJECTIVES = {
    "plain": "contrastive",
    "sigmoid": "sigmoid",
    "matching": "contrastive,matching",
    "all": "sigmoid,matching,captioning:0.5",
    "clip": "contrastive,matching",
    "siglip": "sigmoid,matching",
}
STOCK = ("clip", "siglip")
GOES_ON = {1: 4, 2: 1, 4: 2}  # number of processes: that of the run it goes on from
Case = tuple[str, int, bool]
"""What is trained, a number of parts, and whether the run goes on from another one."""
Launches = list[tuple[int, list[Case]]]
"""Numbers of processes and what they do, in an order in which every run that goes on has one to go on from."""


def every_case() -> Launches:
    straight, resumed = ([(*case, goes_on) for case in product(OBJECTIVES, PARTS)] for goes_on in (False, True))
    return [(1, straight), (2, straight + resumed), (4, straight + resumed), (1, resumed)]


def quick_cases() -> Launches:
    """Cases in which, of objective, processes, parts and interruption, every two values meet; without stock models."""
    return [
        (1, [*((name, 1, False) for name in OBJECTIVES if name not in STOCK), ("matching", 2, False)]),
        (2, [("plain", 2, False), ("matching", 4, False), ("sigmoid", 1, False), ("all", 2, True)]),
        (4, [("sigmoid", 2, False), ("all", 4, False), ("plain", 4, True), ("matching", 1, True)]),
        (1, [("sigmoid", 4, True)]),
    ]


class Watched:
    """A loader that writes down which images it yielded."""

    def __init__(self, loader: DeviceLoader):
        self.loader = loader
        self.wait = 0.0
        self.image_ids: list[list[str]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            self.image_ids.append(batch["image_ids"])
            yield batch


def arguments_of(root: Path, name: str) -> ModelArguments:
    if name in STOCK:
        return ModelArguments(str(root / name))
    return ModelArguments(
        vision_config=str(root / "vision.json"), text_config=str(root / "text.json"), projection="mlp"
    )


def scenes_on_this_rank(accelerator: Accelerator, model_args: ModelArguments) -> tuple[Dataset, ProcessorMixin]:
    """The embedded scenes; some images have the captions of another one as negatives."""
    with accelerator.main_process_first():
        pairs = load_pairs(DataArguments(max_train_samples=256))
        processor = load_processor(model_args, iterate_captions(pairs["train"]))
        captions = pairs["train"]["captions"]
        wrong = [captions[place - 1] if place % 3 else [] for place in range(len(captions))]
        pairs["train"] = pairs["train"].add_column("negatives", wrong, feature=List(Value("string")))
        return tokenize_splits(pairs, processor.tokenizer, 64, readers=[Negatives()])["train"], processor


def runs_on_this_rank(root: Path, cases: list[Case]) -> dict[Case, list[list[str]]]:
    """Train; return which images each step showed this rank."""
    let_accelerate_find_ranks()
    accelerator = make_accelerator()
    scenes = {}
    seen = {}
    for case in cases:
        kind = case[0] if case[0] in STOCK else "scratch"
        if kind not in scenes:
            scenes[kind] = scenes_on_this_rank(accelerator, arguments_of(root, kind))
        seen[case] = train(accelerator, root, case, *scenes[kind])
    return seen


def train(
    accelerator: Accelerator, root: Path, case: Case, rows: Dataset, processor: ProcessorMixin
) -> list[list[str]]:
    """What `scripts/pretrain.py` does between its data and its evaluation."""
    name, parts, resumed = case
    world = distributed.world_size()
    rows = rows if name == "all" else rows.remove_columns(NEGATIVE_IDS)
    args = TrainingArguments(
        output_dir=str(folder_of(root, world, name, parts, resumed)),
        global_batch_size=BATCH,
        micro_batch_size=None if parts == 1 else str(BATCH // world // parts),
        max_steps=STEPS,
        save_steps=STOP,
    )
    Path(str(args.output_dir)).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    loaders = make_loaders(LoaderArguments(dataloader_num_workers="0"), accelerator.device, processor, [Negatives()])
    model = build_model(arguments_of(root, name), processor.tokenizer, medium=loaders.medium.kind)
    objective = build_objective(model, ObjectiveArguments(OBJECTIVES[name]), args.seed)
    optimizer = build_optimizer(model, ADAM, pretrained=False, device=accelerator.device)
    order = GlobalOrder(len(rows), args.batch_sizes, args.seed)
    watched = []

    def batches(first, stop):
        watched.append(Watched(loaders.train(rows, order, first, stop)))
        return watched[-1]

    data = SimpleNamespace(
        **{"train_batches": batches, "num_rows": len(rows), "max_seq_length": 64, "identity": {}},
        **{"processor": processor, "eval_loader": None, "loaders": loaders, "order": order, "features": None},
    )
    start = earlier_run(root, GOES_ON[world], name, parts) / f"checkpoint-{STOP}" if resumed else None
    Trainer(Training(args, ADAM, accelerator, data), objective, optimizer).train(start)
    return watched[-1].image_ids


def folder_of(root: Path, world: int, name: str, parts: int, resumed: bool = False) -> Path:
    return root / f"{world}-{name}-{parts}{'-resumed' if resumed else ''}"


def earlier_run(root: Path, world: int, name: str, parts: int) -> Path:
    """A straight run, in as many parts where there is one."""
    same = folder_of(root, world, name, parts)
    return same if same.exists() else min(root.glob(f"{world}-{name}-?"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the norm, or to how far all steps together could move a parameter that began at zero."""
    farthest = STEPS * NEW_RATE * right.numel() ** 0.5
    return float((found - right).norm()) / max(float(right.norm()), farthest)


@pytest.mark.parametrize(
    "launches",
    [pytest.param(quick_cases(), id="quick"), pytest.param(every_case(), id="every", marks=pytest.mark.slow)],
)
def test_hardware_only_changes_the_speed(launches: Launches, tmp_path: Path) -> None:
    for name, config in (("vision", VISION), ("text", TEXT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    for kind in STOCK:
        write_stock(tmp_path / kind, kind)
    rows = {}
    for world, cases in launches:
        by_rank = run_on_ranks(world, runs_on_this_rank, tmp_path, cases)
        for case in cases:
            name, _, resumed = case
            steps = zip(*(shares[case] for shares in by_rank), strict=True)
            together = [sorted(image_id for share in step for image_id in share) for step in steps]
            assert together == rows.setdefault(name, together)[STOP if resumed else 0 :], (world, case)
            right = weights_of(folder_of(tmp_path, 1, name, 1))
            found = weights_of(folder_of(tmp_path, world, *case))
            assert found.keys() == right.keys()
            for weight, value in right.items():
                assert error(found[weight], value) < TOLERANCE, (weight, world, case)
    for name in rows:
        assert len(rows[name]) == STEPS
        assert len(set(rows[name][0])) == BATCH
        reference = folder_of(tmp_path, 1, name, 1)
        half_way = weights_of(reference / f"checkpoint-{STOP}")
        end = weights_of(reference)
        assert max(error(half_way[weight], value) for weight, value in end.items()) > 10 * TOLERANCE
