"""The signature: hardware only changes the speed.

Four steps on the embedded data set, in fp32, with all defaults, backbones that have dropout in their configs, and projections
with dropout, on 1, 2 and 4 processes, with the local batch in 1, 2 and 4 parts, straight through or continued after step 2 by
another number of processes: all of them see the same rows in the same order, and end with the same parameters, temperature
and bias included. The last objective also has rows with negatives.
"""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, List, Value
from transformers import ProcessorMixin, TrainerCallback

from mm_utils import distributed
from mm_utils.data.batches.loaders import DeviceLoader, LoaderArguments, Loaders, make_loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.media.riff import write_wav
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.objectives.grounding.regions import RegionReader
from mm_utils.objectives.negatives import NEGATIVE_IDS, Negatives
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import NEW_RATE, OPTIMIZERS, OptimizerArguments, build_optimizer
from mm_utils.training.trainer import Trainer
from tests.kit.media_files import rows_with_moments
from tests.kit.ranks import let_accelerate_find_ranks, run_on_ranks
from tests.kit.stock_folders import write_stock

STEPS, STOP, BATCH = 4, 2, 16
TOLERANCE = 1e-5
# An epsilon far below the gradients would divide rounding by rounding: where a gradient is zero but for the last digits,
# those digits would choose the direction of a whole step.
OPTIMIZERS["smooth_adamw"] = (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-3})
ADAM = OptimizerArguments(optim="smooth_adamw")
NO_WORKERS = LoaderArguments(dataloader_num_workers="0")
TEXT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # fmt: skip
VISION = {**TEXT, "model_type": "vit", "patch_size": 8, "image_size": 32}


class Watched:
    """A loader that writes down which images it yielded."""

    def __init__(self, loader: DeviceLoader):
        self.loader, self.wait = loader, 0.0
        self.image_ids: list[list[str]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            self.image_ids.append(batch["image_ids"])
            yield batch


def encoders(folder: Path, vision: dict[str, Any] = VISION, **flags: Any) -> ModelArguments:
    """Write the configurations of two small encoders."""
    for name, config in (("vision", vision), ("text", TEXT)):
        (folder / f"{name}.json").write_text(json.dumps(config))
    return ModelArguments(vision_config=str(folder / "vision.json"), text_config=str(folder / "text.json"), **flags)


def scenes_on_this_rank(accelerator: Accelerator, model_args: ModelArguments) -> tuple[Dataset, ProcessorMixin]:
    """The embedded scenes; some images have the captions of another one as negatives."""
    with accelerator.main_process_first():
        pairs = load_pairs(DataArguments(max_train_samples=256))
        processor = load_processor(model_args, iterate_captions(pairs["train"]))
        captions = pairs["train"]["captions"]
        wrong = [captions[place - 1] if place % 3 else [] for place in range(len(captions))]
        pairs["train"] = pairs["train"].add_column("negatives", wrong, feature=List(Value("string")))
        return tokenize_splits(pairs, processor.tokenizer, 64, readers=[Negatives()])["train"], processor


def train(
    model_args: ModelArguments,
    objective: str,
    args: TrainingArguments,
    start: Path | None,
    processor: ProcessorMixin,
    rows: Dataset,
    loaders: Loaders,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[Trainer, list[list[str]]]:
    """What `scripts/pretrain.py` does between its data and its evaluation; and which images each step showed this rank."""
    accelerator = make_accelerator()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    model = build_model(model_args, processor.tokenizer, medium=loaders.medium.kind)
    trained = build_objective(model, ObjectiveArguments(objective), args.seed, processor.tokenizer)
    optimizer = build_optimizer(model, ADAM, pretrained=False, device=accelerator.device)
    order = GlobalOrder(len(rows), args.batch_sizes, args.seed)
    watched: list[Watched] = []

    def batches(first: int, stop: int) -> Any:
        watched.append(Watched(loaders.train(rows, order, first, stop)))
        return watched[-1]

    data: Any = SimpleNamespace(
        train_batches=batches,
        loaders=loaders,
        order=order,
        features=None,
        num_rows=len(rows),
        max_seq_length=64,
        identity={},
        processor=processor,
        eval_loader=None,
    )
    trainer = Trainer(args, ADAM, accelerator, trained, optimizer, data, callbacks=callbacks)
    trainer.train(start)
    return trainer, watched[-1].image_ids


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return FusionDualEncoderModel.from_pretrained(folder).state_dict()


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the norm, or to how far all steps together could move a parameter that began at zero."""
    farthest = STEPS * NEW_RATE * right.numel() ** 0.5
    return float((found - right).norm()) / max(float(right.norm()), farthest)


WORLDS = (1, 2, 4)
PARTS = (1, 2, 4)
OBJECTIVES = (
    "contrastive",
    "sigmoid",
    "contrastive,matching",
    "sigmoid,matching,masked_lm:0.5,captioning:0.5",
)
MOMENTS = "contrastive:0.5,moments:0.5"
GOES_ON = {1: 4, 2: 1, 4: 2}  # number of processes: that of the run it goes on from
Case = tuple[str, int, bool]
"""An objective, a number of parts, and whether the run goes on from another one."""


def runs_on_this_rank(root: Path, model_args: ModelArguments, cases: Sequence[Case]) -> dict[Case, list[list[str]]]:
    """Which images each step of these runs showed this rank."""
    let_accelerate_find_ranks()
    world, accelerator = distributed.world_size(), make_accelerator()
    rows, processor = scenes_on_this_rank(accelerator, model_args)
    loaders = make_loaders(NO_WORKERS, accelerator.device, processor, [Negatives()])
    seen = {}
    for objective, parts, resumed in cases:
        seen_rows = rows if "captioning" in objective else rows.remove_columns(NEGATIVE_IDS)
        start = earlier_run(root, GOES_ON[world], objective, parts) / f"checkpoint-{STOP}" if resumed else None
        args = arguments(folder_of(root, world, objective, parts, resumed), objective, parts)
        seen[objective, parts, resumed] = train(model_args, objective, args, start, processor, seen_rows, loaders)[1]
    return seen


def sounds_on_this_rank(root: Path, model_args: ModelArguments, objective: str) -> None:
    """Sounds of 0.6 to 1.3 seconds with up to three moments, in windows of one second."""
    let_accelerate_find_ranks()
    accelerator, rng = make_accelerator(), random.Random(0)
    contents: list[bytes] = []
    seconds, moments = [rng.randint(6, 13) / 10 for _ in range(24)], []
    for number, length in enumerate(seconds):
        samples = np.random.default_rng(number).integers(-9999, 9999, round(16000 * length), np.int16)
        contents.append(write_wav(samples, 16000))
        ends = [sorted(rng.uniform(0, length) for _ in range(2)) for _ in range(number % 4)]
        moments.append([{"span": span, "phrase": f"a {rng.choice(['low', 'high'])} beep"} for span in ends])
    with accelerator.main_process_first():
        rows = rows_with_moments(moments, contents, seconds)
        processor = load_processor(model_args, iterate_captions(rows), "sound", 1.0)
        rows = tokenize_splits(DatasetDict(train=rows), processor.tokenizer, 64, readers=[RegionReader()])["train"]
    loaders = make_loaders(NO_WORKERS, accelerator.device, processor, [RegionReader()])
    for parts in (1, 2):
        args = arguments(folder_of(root, distributed.world_size(), objective, parts, False), objective, parts)
        train(model_args, objective, args, None, processor, rows, loaders)


def arguments(folder: Path, objective: str, parts: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        global_batch_size=BATCH,
        micro_batch_size=None if parts == 1 else str(BATCH // distributed.world_size() // parts),
        max_steps=STEPS,
        save_steps=STOP,
        ema_decay=0.9 if "captioning" in objective else 0.0,
    )


def folder_of(root: Path, world: int, objective: str, parts: int, resumed: bool) -> Path:
    return root / f"{world}-{objective}-{parts}{'-resumed' if resumed else ''}"


def earlier_run(root: Path, world: int, objective: str, parts: int) -> Path:
    """A straight run, in as many parts where there is one."""
    same = folder_of(root, world, objective, parts, False)
    return same if same.exists() else min(root.glob(f"{world}-{objective}-?"))


Launches = list[tuple[int, list[Case]]]
"""Numbers of processes and what they do, in an order in which every run that goes on has one to go on from."""


def every_case() -> Launches:
    straight, resumed = ([(*case, goes_on) for case in product(OBJECTIVES, PARTS)] for goes_on in (False, True))
    return [(1, straight), (2, straight + resumed), (4, straight + resumed), (1, resumed)]


def quick_cases() -> Launches:
    """Cases in which, of objective, processes, parts and interruption, every two values meet."""
    plain, sigmoid, matching, all_terms = OBJECTIVES
    straight = [(objective, 1, False) for objective in OBJECTIVES]
    return [
        (1, [*straight, (matching, 2, False)]),
        (2, [(plain, 2, False), (matching, 4, False), (sigmoid, 1, False), (all_terms, 2, True)]),
        (4, [(sigmoid, 2, False), (all_terms, 4, False), (plain, 4, True), (matching, 1, True)]),
        (1, [(sigmoid, 4, True)]),
    ]


@pytest.mark.parametrize(
    "launches",
    [pytest.param(quick_cases(), id="quick"), pytest.param(every_case(), id="every", marks=pytest.mark.slow)],
)
def test_hardware_only_changes_the_speed(launches: Launches, tmp_path: Path) -> None:
    model_args = encoders(tmp_path, projection="mlp")
    rows: dict[str, list[list[str]]] = {}
    for world, cases in launches:
        by_rank = run_on_ranks(world, runs_on_this_rank, tmp_path, model_args, cases)
        for objective, parts, resumed in cases:
            steps = zip(*(shares[objective, parts, resumed] for shares in by_rank), strict=True)
            together = [sorted(image_id for share in step for image_id in share) for step in steps]
            case = f"{objective}, {world} processes, {parts} parts, {'resumed' if resumed else 'straight'}"
            assert together == rows.setdefault(objective, together)[STOP if resumed else 0 :], case
            reference = folder_of(tmp_path, 1, objective, 1, False)
            right, found = (
                weights_of(folder) for folder in (reference, folder_of(tmp_path, world, objective, parts, resumed))
            )
            assert found.keys() == right.keys()
            for name, value in right.items():
                assert error(found[name], value) < TOLERANCE, f"{name} after {case}"
    for objective in OBJECTIVES:
        assert len(rows[objective]) == STEPS
        assert len(set(rows[objective][0])) == BATCH
        reference = folder_of(tmp_path, 1, objective, 1, False)
        half_way, right = (
            weights_of(path)["visual_projection.weight"] for path in (reference / f"checkpoint-{STOP}", reference)
        )
        assert error(half_way, right) > 10 * TOLERANCE


STOCK = {"clip": "contrastive,matching", "siglip": "sigmoid,matching"}


@pytest.mark.parametrize(
    "runs",
    [
        [(2, {"clip": 2, "siglip": 1})],
        pytest.param([(1, {"clip": 2, "siglip": 2}), (2, {"clip": 1, "siglip": 2})], marks=pytest.mark.slow),
    ],
)
def test_hardware_only_changes_the_speed_of_a_stock_model(
    runs: list[tuple[int, dict[str, int]]], tmp_path: Path
) -> None:
    stock = {kind: write_stock(tmp_path / kind, kind) for kind in STOCK}
    for world, parts in [(1, dict.fromkeys(STOCK, 1)), *runs]:
        run_on_ranks(world, stock_runs_on_this_rank, tmp_path, stock, parts)
        for kind, number in parts.items():
            right = weights_of(folder_of(tmp_path, 1, STOCK[kind], 1, False))
            assert error(load_model(stock[kind]).state_dict()["logit_scale"], right["logit_scale"]) > 10 * TOLERANCE
            for name, value in weights_of(folder_of(tmp_path, world, STOCK[kind], number, False)).items():
                assert error(value, right[name]) < TOLERANCE, (
                    f"{name} of {kind} on {world} processes in {number} parts"
                )


def stock_runs_on_this_rank(root: Path, stock: dict[str, str], parts: dict[str, int]) -> None:
    for kind, number in parts.items():
        runs_on_this_rank(root, ModelArguments(stock[kind]), [(STOCK[kind], number, False)])


@pytest.mark.slow
def test_hardware_only_changes_the_speed_of_moments_in_sounds(tmp_path: Path) -> None:
    """Some sounds have no moment, windows cut others, and the temperature is that of all."""
    sound = {"model_type": "convnext", "num_channels": 1, "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2,
             "patch_size": 4, "image_size": [40, 32], "initializer_range": 0.08, "layer_scale_init_value": 1.0}  # fmt: skip
    model_args = encoders(tmp_path, sound)
    for world in WORLDS:
        run_on_ranks(world, sounds_on_this_rank, tmp_path, model_args, MOMENTS)
    right = weights_of(folder_of(tmp_path, 1, MOMENTS, 1, False))
    log = (folder_of(tmp_path, 1, MOMENTS, 1, False) / "metrics.jsonl").read_text()
    assert "moments_loss" in log
    for world, parts in product(WORLDS, (1, 2)):
        for name, value in weights_of(folder_of(tmp_path, world, MOMENTS, parts, False)).items():
            assert error(value, right[name]) < TOLERANCE, f"{name} on {world} processes in {parts} parts"
