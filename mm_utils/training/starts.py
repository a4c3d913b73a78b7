"""What stands at the start of a run: projections in closed form, and weights that are interpolated with those of the end.

The towers run once over a sample of the training images, on all processes; the main process fits the maps to the gathered
features (`mm_utils.training.closed_form`). The rows, their order and the fit do not depend on the number of processes.

WiSE-FT (arXiv 2109.01903): training on few data often loses what a pretrained model knew; weights between the start and the end
keep some of both, at no cost when the model is used. Weights that are new have no values before, so they are never interpolated.

Shape letters are those of `mm_utils.training.closed_form`.
"""

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.checkpointing.state import write_model
from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.metrics import mean_gain
from mm_utils.evaluation.recall_gain import read_log
from mm_utils.evaluation.reranking import DirectionRanks
from mm_utils.evaluation.retrieval import Evaluate, RetrievalEvaluator, in_turn, keep_weights
from mm_utils.files import append_rows, read_json, write_json
from mm_utils.model.adapt import merged
from mm_utils.model.encoding import vision_features
from mm_utils.model.modeling_fusion_dual_encoder import (
    DUAL_ENCODERS,
    FusionDualEncoderModel,
    ResidualProjection,
    is_trained,
    pool_output,
)
from mm_utils.training.arguments import METRICS_FILE, TrainingArguments
from mm_utils.training.class_names import read_classes
from mm_utils.training.closed_form import ClosedForm, Features, fit
from mm_utils.training.feature_cache import evaluating

logger = logging.getLogger(__name__)

IMAGES = 10_000  # of training, from which the closed form is computed, in 5 s of a core; more than ten times the width change little
BLOCK_WIDTH = 256  # of what the pairs say
FEWEST_IMAGES = 8  # of the closed form's cross-validation in four parts
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def joins_towers(given: Parsed) -> bool:
    """Return whether new projections join two pretrained towers."""
    media = given["vision_model_name_or_path"] or given["model_name_or_path"]
    return bool(media and given["text_model_name_or_path"])


def stacks_blocks(given: Parsed) -> bool:
    """Return whether a pre-training learns nothing but the projections of a whole model."""
    whole = given["model_name_or_path"] and not given["text_model_name_or_path"]
    return bool(whole and given["freeze_vision"] and given["freeze_text"] and given["objectives"])


def has_baseline(given: Parsed, data: TrainingData) -> bool:
    """Return whether the weights before the first step of a pre-training are a model: a whole one, or one in closed form."""
    if not given["objectives"]:
        return False
    whole = given["model_name_or_path"] is not None and given["text_model_name_or_path"] is None
    return whole or (joins_towers(given) and has_sample(data))


def has_sample(data: TrainingData) -> bool:
    """Return whether there are rows enough for a closed form; a stream has none at hand."""
    return "train" in data.splits and len(data.splits["train"]) >= FEWEST_IMAGES


def initialise(
    model: FusionDualEncoderModel,
    data: TrainingData,
    given: Parsed,
    evaluators: Sequence[Evaluate],
    resume_from: Path | None,
    output_dir: Path,
    accelerator: Accelerator,
) -> None:
    """Start projections from closed form where two towers are joined, or a whole model between frozen towers is fitted to pairs.

    A checkpoint has them already, but weights are interpolated with those of the start. The whole model is measured before.
    """
    resumes = resume_from is not None and not given["wise_ft"]
    if joins_towers(given) and has_sample(data) and not resumes:
        with data.timed_pass(IMAGES):
            start_projections(IMAGES, given["vision_model_name_or_path"], data, model, accelerator)
    if not (stacks_blocks(given) and has_sample(data) and can_stack(model)):
        return
    if resumes:
        assert resume_from is not None
        stored = read_json(resume_from / "config.json")
        if any(stored[name] != getattr(model.config, name) for name in ("projection_dim", "dual_encoder_type")):
            widen(model, stored["projection_dim"])
        return
    if resume_from is None and data.eval_loader is not None:
        model.to(accelerator.device).eval()  # type: ignore[arg-type]
        metrics = in_turn(*evaluators)(model, data.evaluation("validation"), accelerator)
        before = {"step": 0, **{f"eval_{name}": value for name, value in metrics.items()}}
        distributed.on_first(partial(append_rows, output_dir / METRICS_FILE, [before]))
    with data.timed_pass(IMAGES):
        start_blocks(IMAGES, data, model, accelerator)


def can_stack(model: FusionDualEncoderModel) -> bool:
    """Return whether a model has no head and projections that are linear or none, no wider than a tower: they are widened once."""
    config = model.config
    if model.fusion is not None:
        return False
    for projection, width in (
        (model.visual_projection, config.vision_pooled_width),
        (model.text_projection, config.text_width),
    ):
        if type(projection) not in (nn.Linear, nn.Identity) or config.projection_dim > width:
            return False
        if isinstance(projection, nn.Identity) and config.projection_dim != width:
            return False
    return True


def start_blocks(images: int, data: TrainingData, model: FusionDualEncoderModel, accelerator: Accelerator) -> None:
    """Put what a whole model knew and what at most N training images say into its projections, and set its temperature.

    Called on all ranks, before the model is prepared.

    Raises:
        ValueError: on all ranks, if fewer images than are needed can be read, or a tower's output is not finite.
    """
    begin = time.monotonic()
    features = paired_features(model, images, data, accelerator, None, pooled_images=True)
    known = _map_of(model.visual_projection, features.image_MA), _map_of(model.text_projection, features.text_TB)
    found = distributed.on_first(partial(fit, features, BLOCK_WIDTH, known))
    logger.info(
        "The projections start from what the model knew and, with weight %g, from the closed form of %s pairs (shrinkage %g, "
        "%.0f s): %s",
        found.pair_weight,
        f"{len(features.image_MA):,}",
        found.shrinkage,
        time.monotonic() - begin,
        found.judged.replace("image", data.medium),
    )
    if found.pair_weight:
        widen(model, found.image_AE.shape[1])
        for projection, map_CE in ((model.visual_projection, found.image_AE), (model.text_projection, found.text_BE)):
            assert isinstance(projection, nn.Linear)
            projection.weight.data.copy_(map_CE.T)
        if model.logit_bias is None:
            model.logit_scale.data.fill_(math.log(found.scale))


def _map_of(projection: nn.Module, features: Tensor) -> Tensor:
    """Return the map `[C, E]` of a projection, or of none."""
    if isinstance(projection, nn.Linear):
        return projection.weight.detach().T
    return torch.eye(features.shape[1])


def widen(model: FusionDualEncoderModel, width: int) -> None:
    """Give a model new projections to an embedding of `width`, whose weights are to be written or loaded.

    SigLIP, whose images have no projection, becomes a `VisionTextDualEncoderModel`.
    """
    config = model.config
    model.visual_projection = nn.Linear(config.vision_pooled_width, width, bias=False).to(model.logit_scale)
    model.text_projection = nn.Linear(config.text_width, width, bias=False).to(model.logit_scale)
    config.projection_dim = width
    if config.dual_encoder_type == "siglip":
        config.dual_encoder_type = DUAL_ENCODERS[0]


def start_projections(
    images: int, vision_name: str | None, data: TrainingData, model: FusionDualEncoderModel, accelerator: Accelerator
) -> None:
    """Set both projections and the temperature to their closed form, of at most N training images.

    Without `vision_name` the images' projection stays, and the texts' is fitted to its embeddings; the other way round where the
    texts' is frozen. Called on all ranks, before the model is prepared.

    Raises:
        ValueError: on all ranks, if fewer images than are needed can be read, or a tower's output is not finite.
    """
    begin = time.monotonic()
    features = paired_features(model, images, data, accelerator, vision_name)
    found = distributed.on_first(partial(fit, features, model.config.projection_dim))
    if not found.image_AE.any():
        logger.warning("Images or captions are embedded all alike, so the projections start from random values")
        return
    if not is_trained(model.text_projection):  # scores of the fit, of texts as they are
        found = replace(found, image_AE=found.image_AE @ found.text_BE.T, text_BE=torch.zeros(0))
    elif vision_name is None:  # scores of the fit, of images as they are
        found = replace(found, text_BE=found.text_BE @ found.image_AE.T, image_AE=torch.zeros(0))
    write_projections(model, found)
    logger.info(
        "Projections start from the closed form of %s %ss (shrinkage %g, weight of class names %g, %.0f s): %s",
        f"{len(features.image_MA):,}",
        data.medium,
        found.shrinkage,
        found.name_weight,
        time.monotonic() - begin,
        found.judged.replace("image", data.medium),
    )


@torch.no_grad()
def paired_features(
    model: FusionDualEncoderModel,
    images: int,
    data: TrainingData,
    accelerator: Accelerator,
    vision_name: str | None,
    pooled_images: bool = False,
) -> Features:
    """Run both towers over at most N training rows, shared by ranks; return all features in the rows' order.

    Where a frozen tower has run over the rows already, its stored output is read. Images are pooled outputs of the tower with
    `vision_name` or `pooled_images`, else embeddings.

    Raises:
        ValueError: if no image can be decoded.
    """
    logger.info(
        "Projections are fitted in closed form to %s training %ss",
        f"{min(images, len(data.splits['train'])):,}",
        data.medium,
    )
    device = accelerator.device
    config = model.config
    keeps_text = not is_trained(model.text_projection)
    pooled_images = pooled_images or vision_name is not None
    widths = (
        config.vision_pooled_width if pooled_images else config.projection_dim,
        (config.projection_dim if keeps_text else config.text_width),
    )
    pooled = [torch.empty(0, widths[0], device=device)]
    texts = [torch.empty(0, widths[1], device=device)]
    seen = [torch.empty(0, widths[1], device=device)]
    number = 0
    owners = [torch.empty(0, dtype=torch.long, device=device)]

    def text_features(batch: Mapping[str, Any]) -> Tensor:
        """Return the pooled output of the text tower, `[t, B]`; of a frozen projection, its output."""
        if "text_pooled" in batch:
            found = batch["text_pooled"].to(model.dtype)
        else:
            found, _ = model.text_features(batch["input_ids"], batch["attention_mask"], with_taps=False)
        return (model.project_text(found)[0] if keeps_text else found).float()

    pool = partial(pool_output, pooling=config.vision_pooling)
    with ExitStack() as stack:
        stack.enter_context(evaluating(model, model, device))
        classes = read_classes(vision_name, model.vision_model, pool)
        stack.enter_context(accelerator.autocast())
        rows = data.rows("train") if classes is None or classes.reads_pooled else data.splits["train"]
        if images < len(rows):
            rows = rows.select([place * len(rows) // images for place in range(images)])  # at equal distances
        name_NB = torch.zeros(0)
        if classes is not None:
            ids = encode_captions(data.processor.tokenizer, classes.names, data.max_seq_length)
            padded = [part.to(device) for part in pad_captions(ids, data.loaders.pad_token_id)]
            split = zip(*(part.split(data.eval_batch_size) for part in padded), strict=True)
            parts = [text_features({"input_ids": tokens, "attention_mask": mask}) for tokens, mask in split]
            name_NB = F.normalize(torch.cat(parts), dim=-1)
        loader = data.loaders.evaluation(rows, data.eval_batch_size)
        for batch in distributed.progress(loader, "Closed form"):
            if not len(batch["rows"]):
                continue
            seen_BC, _ = vision_features(model, batch, with_taps=False)
            pooled.append((seen_BC if pooled_images else model.project_image(seen_BC, ())[0]).float())
            if classes is not None:
                seen.append(classes.probabilities(pooled[-1] if "vision_pooled" in batch else None) @ name_NB)
            texts.append(text_features(batch))
            owners.append(batch["caption_image"] + number)  # among the rows of this rank
            number += len(batch["rows"])
    if classes is not None:
        classes.handle.remove()
    sizes = distributed.gather_sizes(sum(map(len, pooled)), device)
    caption_sizes = distributed.gather_sizes(sum(map(len, texts)), device)
    if not sum(sizes):
        raise ValueError(
            "no training image of the sample for the closed form could be decoded. Give images that can be read."
        )
    owners = [owner + sum(sizes[: distributed.rank()]) for owner in owners]  # among those of all ranks
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


def interpolate_weights(
    start: Mapping[str, Tensor],
    model: Any,
    data: TrainingData,
    evaluators: Sequence[Evaluate],
    args: TrainingArguments,
    accelerator: Accelerator,
    retrieval: RetrievalEvaluator | None = None,
) -> tuple[Any, dict[str, float]]:
    """Measure weights between those of the start and the saved ones; save those of `nearest_to_start`, and `wise_ft.json`.

    The run's metric chooses, after re-ranking where that is measured. Alpha 0 is the evaluation before training. Returned are
    the model and its metrics. `retrieval` is that of `evaluators` in a pre-training.
    """
    folder = Path(args.output_dir or ".")
    model = type(model).from_pretrained(folder).to(accelerator.device).eval()
    end = {name: value.detach().clone() for name, value in model.state_dict().items()}
    loader = data.evaluation("validation")
    measured = dict[float, dict[str, float]]()
    ranks = dict[float, dict[str, DirectionRanks]]()

    def measure(alpha: float) -> dict[str, float]:
        model.load_state_dict(interpolate(start, end, alpha))
        metrics = in_turn(*evaluators)(model, loader, accelerator)
        keep_weights(model, evaluators)
        return metrics

    metric = args.metric_for_best_model
    for alpha in ALPHAS:
        measured[alpha] = measure(alpha)
        metric = f"rerank_{metric}" if f"rerank_{metric}" in measured[alpha] else metric
        logger.info("alpha %.2f: %s %.4f", alpha, metric, measured[alpha][metric])
        if retrieval is not None:
            ranks[alpha] = dict(retrieval.directions)
    is_first = not read_log(folder / METRICS_FILE, f"eval_{args.metric_for_best_model}")[0]
    if retrieval is not None and is_first:
        retrieval.first = {name: each.best_Q for name, each in ranks[0.0].items()}
    sign = 1 if args.greater_is_better else -1
    chosen = nearest_to_start({alpha: sign * found[metric] for alpha, found in measured.items()}, ranks, metric)
    measure(chosen)  # so that the evaluator holds the predictions of the chosen weights
    rows = [{"alpha": alpha, **metrics} for alpha, metrics in measured.items()]
    logged = [{"step": 0, **{f"eval_{name}": value for name, value in measured[0.0].items()}}]
    if chosen == 0:
        logged.append({"step": 0, "saved_step": 0})
    report = {"metric": metric, "saved_alpha": chosen, "measured": rows}

    def write() -> None:
        write_model(folder, model, data.processor)
        write_json(folder / "wise_ft.json", report)
        append_rows(folder / METRICS_FILE, logged)

    distributed.on_first(write)
    return model, {f"eval_{name}": value for name, value in measured[chosen].items()} | {"eval_wise_ft_alpha": chosen}


def nearest_to_start(
    figures: Mapping[float, float], ranks: Mapping[float, Mapping[str, DirectionRanks]], metric: str
) -> float:
    """Return the alpha of the highest figure; of those that are equal, or that the split cannot tell from it, the least.

    What is chosen by mean recall is told apart by the 95 % interval of the difference of each query; `ranks` has the ranks of each alpha.
    """
    best = max(figures, key=lambda alpha: (figures[alpha], -alpha))
    for alpha in sorted(figures):
        if alpha < best and ranks and metric.endswith("mean_recall"):
            pairs = ((ranks[alpha][name], ranks[best][name]) for name in ranks[best])
            gain, half, _ = mean_gain((one.best_Q, other.best_Q, other.queries.group) for one, other in pairs)
            if gain <= half:
                return alpha
    return best


def weights_of_start(model: FusionDualEncoderModel, added: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a copy of the weights to interpolate, with adapters merged.

    They are all but a classifier's, a head's that never was trained, and those that terms have added for this run.
    """
    new = ("classifier.", *added) if model.voices else ("classifier.", "fusion.", *added)
    weights = merged(model.state_dict())
    return {name: value.detach().clone() for name, value in weights.items() if not name.startswith(new)}


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Return start + alpha (end - start); integers and weights of `end` alone stay."""
    return {
        name: torch.lerp(start[name].to(value), value, alpha)
        if name in start and value.is_floating_point()
        else value.clone()
        for name, value in end.items()
    }
