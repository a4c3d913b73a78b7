"""Four steps on the embedded scenes with all defaults, on any number of processes and in any number of parts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, List, Value
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import ProcessorMixin, TrainerCallback

from mm_utils import distributed
from mm_utils.data.batches.loaders import DeviceLoader, LoaderArguments, Loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.objectives.joint import JointObjective
from mm_utils.objectives.negatives import Negatives
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.callbacks import TemperatureClamp
from mm_utils.training.optim import NEW_RATE, OptimizerArguments, build_optimizer
from mm_utils.training.sharded import initialise_fsdp_root, make_shardable
from mm_utils.training.trainer import Trainer

STEPS, STOP, BATCH = 4, 2, 16
TOLERANCE = 1e-5
# An epsilon far below the gradients would divide rounding by rounding: where a gradient is zero but for the last digits,
# those digits would choose the direction of a whole step.
ADAM = OptimizerArguments(adam_epsilon=1e-3)
NO_WORKERS = LoaderArguments(dataloader_num_workers="0")
VISION = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 8,
    "image_size": 32,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
TEXT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # fmt: skip


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
    widths = "8,16" if "captioning" in objective else None
    objectives = ObjectiveArguments(objective, matryoshka_dims=widths)
    trained = build_objective(model, objectives, args.seed, processor.tokenizer)
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
    watchers = [TemperatureClamp(100.0), *callbacks]
    trainer = Trainer(args, ADAM, accelerator, trained, optimizer, data, callbacks=watchers)
    trainer.train(start)
    return trainer, watched[-1].image_ids


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return FusionDualEncoderModel.from_pretrained(folder).state_dict()


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the norm, or to how far all steps together could move a parameter that began at zero."""
    farthest = STEPS * NEW_RATE * right.numel() ** 0.5
    return float((found - right).norm()) / max(float(right.norm()), farthest)


def sharded(objective: JointObjective) -> JointObjective:
    make_shardable(objective)
    objective.is_wrapped, objective.groups_texts = False, False
    mesh = init_device_mesh("cpu", (distributed.world_size(),))
    model = objective.model
    layers = model.fusion.layers if model.fusion is not None else ()
    for part in (model.vision_model, model.text_model, *layers, objective):
        fully_shard(part, mesh=mesh)
    initialise_fsdp_root(objective)
    return objective
