"""Run a frozen tower once over the training data, store its output, and train from that.

All processes compute it before the first step, of training rows and, unless an evaluator asks for the media themselves, of those
that are evaluated, and keep it in the datasets cache under a fingerprint of everything it depends on: weights and config of the
tower, preprocessing, precision and data, but not the number of processes or the batch size. A step then runs only what is trained,
and decodes no image. The price is cropping: every epoch sees the centre square of an image, as evaluation does.

Two runs that begin at once both compute it, as none may keep its ranks waiting for another's; the first that ends wins.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets.arrow_writer import ArrowWriter
from torch import Tensor, nn

from mm_utils import distributed
from mm_utils.data.batches.column_cache import SKIPPED, add_weights, column_digest, image_digest, to_arrow
from mm_utils.data.batches.order import Draw, evaluation_batches
from mm_utils.data.batches.tokens import fingerprint, pad_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.retrieval import Evaluate
from mm_utils.model.encoding import passes_of_texts
from mm_utils.model.modeling_fusion_dual_encoder import is_trained
from mm_utils.objectives.objective import Objective
from mm_utils.stored import discard, is_whole, key_of, open_rows, place_of, storing

logger = logging.getLogger(__name__)

Block = tuple[dict[str, tuple[Any, ...]], dict[str, pa.Array]]
"""Some rows: the arguments of `to_arrow` for every column of features, and further columns."""


def cache_features(
    data: TrainingData,
    objective: Objective,
    accelerator: Accelerator,
    evaluators: Sequence[Evaluate] = (),
    root: Path | None = None,
) -> TrainingData:
    """Return the data with frozen towers' output beside the rows; it is stored below `root`, or in the datasets cache.

    The rows are those of training and, where all `evaluators` read features, of validation.
    Called on all ranks, before the model is prepared. Rows that are evaluated have image taps too, for a head that re-ranks;
    states of their captions are computed there, for the chosen pairs alone. A classifier reads the same of all rows.

    Raises:
        ValueError: if no tower is frozen, if a tower's output is not finite, or if processes share no cache.
    """
    model = objective.model
    config = objective.model.config
    towers = [name for name, tower in model.towers.items() if not is_trained(tower)]
    if not towers:
        flags = " or ".join(f"--freeze_{name}" for name in model.towers)
        raise ValueError(
            "--cache_features is set, and no tower is frozen; only the output of a frozen tower can be kept. Set "
            f"{flags}, or drop --cache_features."
        )
    splits = ["train"]
    features = dict(data.features)
    if (
        evaluators
        and "validation" in data.splits
        and all(getattr(each, "reads_features", False) for each in evaluators)
    ):
        splits.append("validation")
    with data.timed_pass():
        for split in splits:
            found = rows = data.splits[split]
            batches = evaluation_batches(len(rows), data.eval_batch_size)
            trains = split == "train"
            store = partial(stored_features, model=model, batches=batches, accelerator=accelerator, root=root)
            if "vision" in towers:
                with_taps = objective.reads_taps or (not trains and objective.reranks and bool(model.voices))
                head = (config.fusion_vision_taps, config.fusion_tokens_per_tap) if with_taps else None
                depends_on = (
                    data.loaders.medium.key,
                    config.vision_pooling,
                    head,
                    fingerprint(rows),
                    image_digest(rows),
                )
                blocks = _image_features(model, data, rows, batches, with_taps, accelerator)
                stored = store("vision", model.vision_model, depends_on, blocks)
                if len(skipped := stored.data.column(SKIPPED).drop_null()):
                    text = "%d images of the %s split cannot be decoded: %s"
                    logger.warning(text, len(skipped), split, skipped[:3].to_pylist())
                found = datasets.concatenate_datasets([rows.remove_columns("image"), stored], axis=1)
            if "text" in towers:
                with_states = objective.reads_pairs and (trains or not objective.reranks)
                head = config.fusion_text_taps if with_states else None
                words = config.text_pooling, head, column_digest(rows, "input_ids")
                blocks = _text_features(model, data, rows, batches, with_states, accelerator)
                stored = store("text", model.text_model, words, blocks)
                found = datasets.concatenate_datasets([found, stored], axis=1)
            features[split] = found
    if root is None:  # a dry run leaves none
        logger.info(
            "Features of the frozen %s encoder%s are in %s",
            " and ".join(towers),
            "s" * (len(towers) > 1),
            place_of("features", ""),
        )
    return replace(data, features=features)


@contextmanager
def evaluating(model: Any, part: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep a model in evaluation mode within, and a part of it on the device."""
    was_training = model.training
    home = next(part.parameters()).device
    model.eval()
    part.to(device)
    try:
        yield
    finally:
        part.to(home)
        model.train(was_training)


def stored_features(
    name: str,
    tower: Any,
    depends_on: tuple,
    blocks: Iterator[Block],
    *,
    model: Any,
    batches: Sequence[list[Draw]],
    accelerator: Accelerator,
    flag: str = "--cache_features",
    root: Path | None = None,
) -> datasets.Dataset:
    """Return the stored features, one row per training row; compute them if there is no store.

    Args:
        tower: what computes the features; `model`, of which it is a part, is in evaluation mode meanwhile.
        depends_on: all that the features depend on besides tower and precision.
        blocks: the features of this rank's rows, one block for each of `batches`.
        root: where they are stored; by default the datasets cache.
    """
    with ExitStack() as writing:

        def place() -> tuple[Path, Path | None]:
            key = key_of(name, weights_digest(tower), accelerator.mixed_precision, depends_on)
            folder = place_of("features", key, root)
            if is_whole(folder):
                return folder, None
            discard(folder)
            return folder, writing.enter_context(storing(folder))

        folder, temporary = distributed.on_first(place)
        # All ranks look only now: a network file system may remember for a while that a folder was missing.
        if distributed.any_rank(not (temporary or folder).is_dir(), accelerator.device):
            raise ValueError(
                f"HF_DATASETS_CACHE is {datasets.config.HF_DATASETS_CACHE}; not every process sees there what another "
                f"one writes, and {flag} shares the work. Set it to a folder that all machines see."
            )
        if temporary is not None:
            shard = str(temporary / f"{distributed.rank():05d}.arrow")
            writer = None
            is_finite = True
            with evaluating(model, tower, accelerator.device):
                for features, more in distributed.progress(blocks, f"Caching {name} features", total=len(batches)):
                    is_finite = is_finite and all(bool(values.isfinite().all()) for values, *_ in features.values())
                    columns = {
                        column: to_arrow(values.float(), *counts) for column, (values, *counts) in features.items()
                    }
                    table = pa.table({**columns, **more})
                    writer = writer or ArrowWriter(path=shard, schema=table.schema)
                    writer.write_table(table)
            if writer is not None:
                writer.finalize()
            if distributed.any_rank(not is_finite, accelerator.device):
                raise ValueError(
                    f"{flag} is set, and the frozen {name} tower computes values that are not finite. Train in bf16 or fp32, "
                    f"take another tower, or drop {flag}."
                )
        distributed.on_first(writing.close)
    return open_rows(folder)


@torch.no_grad()
def _image_features(
    model: Any,
    data: TrainingData,
    rows: datasets.Dataset,
    batches: Sequence[list[Draw]],
    with_taps: bool,
    accelerator: Accelerator,
) -> Iterator[Block]:
    def run(pixel_values: Tensor) -> list[Tensor]:
        with accelerator.autocast():
            pooled, taps = model.vision_features(pixel_values, with_taps=with_taps)
        return [pooled, *taps]

    blank = run(data.loaders.blank(1))  # for the shapes
    # 'vision_taps_0', 'vision_taps_1', ...
    names = ["vision_pooled", *(f"vision_taps_{place}" for place in range(len(blank) - 1))]
    for draws, batch in zip(batches, data.loaders.evaluation(rows, data.eval_batch_size), strict=True):
        places = {row: place for place, (row, _) in enumerate(draws)}
        there = torch.tensor([places.pop(row) for row in batch["rows"].tolist()], device=blank[0].device).long()
        found = run(batch["pixel_values"]) if len(there) else [value[:0] for value in blank]
        values = [
            # an image that cannot be decoded keeps its row, of zeros, and has its reason in SKIPPED
            none.new_zeros(len(draws), *none.shape[1:]).index_copy(0, there, value)
            for none, value in zip(blank, found, strict=True)
        ]
        reasons = dict(zip(places.values(), batch["skipped"], strict=True))
        skipped = pa.array([reasons.get(place) for place in range(len(draws))], pa.string())
        yield {name: (value,) for name, value in zip(names, values, strict=True)}, {SKIPPED: skipped}


@torch.no_grad()
def _text_features(
    model: Any,
    data: TrainingData,
    rows: datasets.Dataset,
    batches: Sequence[list[Draw]],
    with_states: bool,
    accelerator: Accelerator,
) -> Iterator[Block]:
    """Run the text tower on all captions of every image, without most of their padding."""
    tokens = rows.select_columns(["input_ids"])
    device = accelerator.device
    for draws in batches:
        of_rows = tokens[[row for row, _ in draws]]["input_ids"] if draws else []
        captions = [ids for row in of_rows for ids in row]
        counts = [len(row) for row in of_rows]
        pooled = torch.zeros(len(captions), model.config.text_width)
        none = torch.zeros(0, len(model.config.fusion_text_taps) * model.config.text_width)
        states = [none] * len(captions)
        order = sorted(range(len(captions)), key=lambda place: -len(captions[place]))
        lengths = [len(captions[place]) for place in order]
        if captions:
            padded = pad_captions([captions[place] for place in order], data.loaders.pad_token_id)
            ids, mask = send_to_device(padded, device)
            with accelerator.autocast():
                for rows_t, pooled_tC, states_tLC in passes_of_texts(model, ids, mask, lengths, with_states):
                    places = order[rows_t]
                    pooled[places] = pooled_tC.float().cpu()
                    for place, state_LC in zip(places, states_tLC if with_states else (), strict=False):
                        states[place] = state_LC[: len(captions[place])].float().cpu()  # without its padding
        features: dict[str, tuple[Any, ...]] = {"text_pooled": (pooled, counts)}
        if with_states:
            features["text_states"] = (torch.cat([none, *states]), [len(ids) for ids in captions], counts)
        yield features, {}


def weights_digest(tower: nn.Module) -> str:
    """Return a hash of the weights and the config, without the place they were loaded from."""
    digest = hashlib.blake2b(digest_size=16)
    config = tower.config.to_dict()  # type: ignore[operator, union-attr]
    passing = ("transformers_version", "dtype", "torch_dtype")
    kept = sorted((name, value) for name, value in config.items() if name[0] != "_" and name not in passing)
    digest.update(f"{type(tower).__name__} {kept}".encode())
    add_weights(digest, tower.state_dict())
    return digest.hexdigest()
