"""Start projections between pretrained towers from closed form, before the first step.

The towers run once over a sample of the training images, on all processes; the main process fits the maps to the gathered
features, as `mm_utils.training.starts.closed_form` says. The rows, their order and the fit do not depend on the number of processes.

At 10,000 images and widths of 1,280 and 384 the features take 70 MB, and the fit 5 seconds of a core; the time is that of one
evaluation of as many images. A width of 4,096 takes minutes. More images than about ten times the larger width change little,
so the sample need not grow with the data.
"""

import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.model.encoding import vision_features
from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderModel,
    ResidualProjection,
    is_trained,
    pool_output,
)
from mm_utils.training.starts.class_names import read_classes
from mm_utils.training.starts.closed_form import ClosedForm, Features, fit

logger = logging.getLogger(__name__)


def start_projections(
    images: int, vision_name: str | None, data: TrainingData, model: FusionDualEncoderModel, accelerator: Accelerator
) -> None:
    """Set both projections and the temperature to their closed form, of at most N training images.

    Without `vision_name` the images' projection stays, and the texts' is fitted to its embeddings; the other way round where the
    texts' is frozen.

    Called on all ranks, before the model is prepared.

    Raises:
        ValueError: on all ranks, if fewer images than are needed can be read, or a tower's output is not finite.
    """
    begin = time.monotonic()
    features = paired_features(model, images, data, accelerator, vision_name)

    def fitted() -> ClosedForm:
        try:
            return fit(features, model.config.projection_dim)
        except (ValueError, torch.linalg.LinAlgError) as error:
            raise ValueError(
                f"the closed-form start cannot be computed; {str(error).rstrip('.')}. Give more images that can be read."
            ) from error

    found = distributed.on_first(fitted)
    if not found.image_AE.any():
        logger.warning("Images or captions are embedded all alike, so the projections start from random values")
        return
    if not is_trained(model.text_projection):  # scores of the fit, of texts as they are
        found = replace(found, image_AE=found.image_AE @ found.text_BE.T, text_BE=torch.zeros(0))
    elif vision_name is None:  # scores of the fit, of images as they are
        found = replace(found, text_BE=found.text_BE @ found.image_AE.T, image_AE=torch.zeros(0))
    write_projections(model, found)
    logger.info(
        "Projections start from the closed form of %s images (shrinkage %g, weight of class names %g, %.0f s): recall@1 of pairs "
        "left out of the fit %.3f text to image and %.3f image to text, among %d",
        *(f"{len(features.image_MA):,}", found.shrinkage, found.name_weight, time.monotonic() - begin),
        *(*found.recalls, found.candidates),
    )


@torch.no_grad()
def paired_features(
    model: FusionDualEncoderModel, images: int, data: TrainingData, accelerator: Accelerator, vision_name: str | None
) -> Features:
    """Run both towers over at most N training rows, shared by ranks; return all features in the rows' order.

    Where a frozen tower has run over the rows already, its stored output is read.

    Raises:
        ValueError: if no image can be decoded.
    """
    was_training, home, device = model.training, model.logit_scale.device, accelerator.device
    model.eval()
    model.to(device)  # type: ignore[arg-type]
    width = model.config.vision_pooled_width if vision_name else model.config.projection_dim
    pooled = [torch.empty(0, width, device=device)]
    text_width = model.config.text_width if is_trained(model.text_projection) else model.config.projection_dim
    texts, seen = ([torch.empty(0, text_width, device=device)] for _ in range(2))
    owners, number = [torch.empty(0, dtype=torch.long, device=device)], 0
    pool = partial(pool_output, pooling=model.config.vision_pooling)
    with read_classes(vision_name, model.vision_model, pool) as classes, accelerator.autocast():
        reads_stored = classes is None or classes.reads_pooled
        rows = _sample(data.rows("train") if reads_stored else data.splits["train"], images)
        loader = data.loaders.evaluation(rows, data.eval_batch_size)
        name_NB = None if classes is None else _embed_names(model, classes.names, data, device)
        for batch in tqdm(loader, desc="Closed form", leave=False, disable=not accelerator.is_main_process, delay=2):
            if not len(batch["rows"]):
                continue
            seen_BC, _ = vision_features(model, batch, with_taps=False)
            pooled.append((seen_BC if vision_name else model.project_image(seen_BC, ())[0]).float())
            if classes is not None and name_NB is not None:
                seen.append(classes(pooled[-1] if "vision_pooled" in batch else None) @ name_NB)
            texts.append(_text_features(model, batch))
            owners.append(batch["caption_image"] + number)
            number += len(batch["rows"])
    model.to(home)  # type: ignore[arg-type]
    model.train(was_training)
    sizes, caption_sizes = (distributed.gather_sizes(sum(map(len, each)), device) for each in (pooled, texts))
    if not sum(sizes):
        raise ValueError(
            "no training image of the sample for the closed form could be decoded. Give images that can be read."
        )
    owners = [owner + sum(sizes[: distributed.rank()]) for owner in owners]
    return Features(
        distributed.gather(torch.cat(pooled), sizes),
        distributed.gather(torch.cat(texts), caption_sizes),
        distributed.gather(torch.cat(owners), caption_sizes),
        None if classes is None else distributed.gather(torch.cat(seen), sizes),
    )


@torch.no_grad()
def write_projections(model: FusionDualEncoderModel, found: ClosedForm) -> None:
    """Put maps into projections, at the norm of old weights; set the temperature.

    A model with a bias, for the sigmoid loss, keeps its temperature: the fitted one is that of a softmax.
    """
    for projection, map_CE, mean_C in (
        (model.visual_projection, found.image_AE, found.image_mean_A),
        (model.text_projection, found.text_BE, found.text_mean_B),
    ):
        if not len(map_CE):
            continue
        assert isinstance(projection, nn.Linear)
        projection.weight.copy_(map_CE.T * (projection.weight.norm() / map_CE.norm()))
        if isinstance(projection, ResidualProjection):
            projection.center.copy_(mean_C)
    if model.logit_bias is None:
        model.logit_scale.fill_(math.log(found.scale))


def _sample(rows: datasets.Dataset, images: int) -> datasets.Dataset:
    """Return rows at equal distances, in their order."""
    images = min(images, len(rows))
    return rows if images == len(rows) else rows.select([place * len(rows) // images for place in range(images)])


def _text_features(model: FusionDualEncoderModel, batch: dict[str, Any]) -> Tensor:
    """Return the pooled output of the text tower for the captions of a batch, `[t, B]`; of a frozen projection, its output."""
    if "text_pooled" in batch:
        pooled = batch["text_pooled"].to(model.dtype)
    else:
        pooled, _ = model.text_features(batch["input_ids"], batch["attention_mask"], with_taps=False)
    return (pooled if is_trained(model.text_projection) else model.project_text(pooled)[0]).float()


def _embed_names(model: FusionDualEncoderModel, names: list[str], data: TrainingData, device: torch.device) -> Tensor:
    """Return the unit text features of the names of classes, `[classes, B]`."""
    ids = encode_captions(data.processor.tokenizer, names, data.max_seq_length)
    found = []
    for start in range(0, len(ids), data.eval_batch_size):
        padded = pad_captions(ids[start : start + data.eval_batch_size], data.loaders.pad_token_id)
        input_ids, attention_mask = (part.to(device) for part in padded)
        found.append(_text_features(model, {"input_ids": input_ids, "attention_mask": attention_mask}))
    return F.normalize(torch.cat(found), dim=-1)
