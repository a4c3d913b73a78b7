"""Classes instead of captions: the model with a classifier on top, and the cross-entropy that trains it.

Shape letters: n this rank's rows, M rows of the training split, C classes.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils.adapters import LoraArguments, add_adapters
from mm_utils.arguments import arg
from mm_utils.modeling_fusion_dual_encoder import (
    CLASSIFIER_INPUTS,
    FusionDualEncoderForClassification,
    FusionDualEncoderModel,
    image_shape,
)
from mm_utils.models import freeze_untouched, load_model, recompute_activations
from mm_utils.objectives.additive import AdditiveObjective
from mm_utils.objectives.joint import blank_pair
from mm_utils.objectives.terms import Batch, Report

logger = logging.getLogger(__name__)


@dataclass
class ClassifierArguments:
    """The model to start from, and what its classifier reads."""

    model_name_or_path: str | None = arg(
        None, "The model to start from: the folder that pretrain left, a checkpoint, or a Hub id."
    )
    classifier_inputs: str | None = arg(
        None,
        "What is classified: fused (the fusion head's [CLS] on image and text), pair (both embeddings side by side), image, "
        "or text. Default: fused where the data and the model allow it, else pair, or what there is.",
    )
    classifier_dropout: float = arg(0.1, "Dropout before the last layer of the classifier.")
    class_weights: str = arg("none", "'balanced' weighs classes against their frequency in training; or 'none'.")
    freeze_vision: bool = arg(False, "Do not train the vision backbone.")
    freeze_text: bool = arg(False, "Do not train the text backbone.")
    gradient_checkpointing: bool = arg(
        False, "Recompute activations in the backward pass: less memory, a third slower."
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path is None:
            raise ValueError("--model_name_or_path is missing; give the folder that pretrain left, or a Hub id.")
        if self.classifier_inputs not in (None, *CLASSIFIER_INPUTS):
            raise ValueError(
                f"--classifier_inputs is {self.classifier_inputs!r}; choose one of {', '.join(CLASSIFIER_INPUTS)}."
            )
        if self.class_weights not in ("balanced", "none"):
            raise ValueError(f"--class_weights is {self.class_weights!r}; choose balanced or none.")
        if not 0 <= self.classifier_dropout < 1:
            raise ValueError(f"--classifier_dropout is {self.classifier_dropout}; give a share in [0, 1).")


def build_classifier(
    args: ClassifierArguments, lora_args: LoraArguments, classes: Sequence[str], *, has_images: bool, has_texts: bool
) -> FusionDualEncoderForClassification:
    """The model that the arguments name with a new classifier for `classes`, frozen parts and adapters set.

    Raises:
        ValueError: if there is no such model, or the classifier is to read what the data or the model lacks.
    """
    base = load_model(str(args.model_name_or_path)).float()
    config = copy.deepcopy(base.config)
    config.classifier_inputs = _inputs(args.classifier_inputs, base, has_images, has_texts)
    config.classifier_dropout = args.classifier_dropout
    config.id2label = dict(enumerate(classes))  # num_labels follows from it
    config.label2id = {name: number for number, name in enumerate(classes)}
    model = FusionDualEncoderForClassification(config, base.vision_model, base.text_model)
    model.load_state_dict(base.state_dict(), strict=False)
    for tower, frozen in (("vision", args.freeze_vision), ("text", args.freeze_text)):
        if frozen:
            model.freeze(tower)
    add_adapters(model, lora_args)
    model.vision_model.to(memory_format=torch.channels_last)  # type: ignore[call-arg]
    _freeze_unread(model)
    if args.gradient_checkpointing:
        recompute_activations(model)
    return model


def _inputs(wanted: str | None, base: FusionDualEncoderModel, has_images: bool, has_texts: bool) -> str:
    fits = {
        "fused": has_images and has_texts,
        "pair": has_images and has_texts,
        "image": has_images,
        "text": has_texts,
    }
    if wanted is not None and not fits[wanted]:
        lacks = "images" if not has_images else "texts"
        raise ValueError(
            f"--classifier_inputs is {wanted}; the data has no {lacks}. Give data that has, or drop the flag."
        )
    if wanted == "fused" and base.fusion is None:
        raise ValueError("--classifier_inputs is fused; the model has no fusion head. Choose pair, or another model.")
    choices = [name for name in CLASSIFIER_INPUTS if fits[name] and (name != "fused" or base.fusion is not None)]
    return wanted or choices[0]


def _freeze_unread(model: FusionDualEncoderForClassification) -> None:
    """Stop training what the classifier does not read: the other tower, temperature, mask tokens."""
    training = model.training
    ones = torch.ones(2, 4, dtype=torch.long)
    logits = model.eval().classify(torch.randn(2, *image_shape(model.vision_model)), ones, ones)
    freeze_untouched(model.parameters(), logits.sum())
    model.train(training)


def weigh_classes(label_M: Tensor, classes: int, kind: str) -> Tensor:
    """Weight of each class, float32 `[C]`: 1, or for `balanced` such that all classes count alike and rows 1 on average.

    A class without rows has weight 0.
    """
    if kind == "none":
        return torch.ones(classes)
    count_C = label_M.bincount(minlength=classes).float()
    present = count_C > 0
    return torch.where(present, len(label_M) / (present.sum() * count_C.clamp(min=1)), 0.0)


class ClassificationObjective(AdditiveObjective):
    """Cross-entropy of the class of each row: the weighted mean over the global batch.

    Args:
        model: with a classifier for C classes.
        label_M: the class of each row of the training split.
        weight_C: what a row of each class counts.
    """

    model: FusionDualEncoderForClassification
    label_M: Tensor
    weight_C: Tensor

    def __init__(self, model: FusionDualEncoderForClassification, label_M: Tensor, weight_C: Tensor):
        super().__init__(model)
        self.register_buffer("label_M", label_M, persistent=False)
        self.register_buffer("weight_C", weight_C, persistent=False)

    def weights(self, batch: Batch) -> Tensor:
        """Those of the rows' classes."""
        return self.weight_C[self.label_M[batch["rows"]]]

    def sums(self, batch: Batch) -> tuple[Tensor, Report]:
        """Weighted cross-entropy, and how many rows were told right."""
        own = len(batch["rows"])
        shown = batch if own else blank_pair(batch)
        logits_nC = self.model.classify(shown["pixel_values"], shown["input_ids"], shown["attention_mask"])[
            :own
        ].float()
        label_n = self.label_M[batch["rows"]]
        losses_n = F.cross_entropy(logits_nC, label_n, reduction="none") * self.weights(batch)
        return losses_n.sum(), {"train_accuracy": (logits_nC.argmax(1) == label_n).sum()}
