"""Build a classifier on top of a trained model."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mm_utils.finetuning.arguments import ClassifierArguments
from mm_utils.model.build import check_model, load_model, make_trainable
from mm_utils.model.encoding import stored_text, vision_features
from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderForClassification,
    FusionDualEncoderModel,
)
from mm_utils.model.processor import load_processor_of
from mm_utils.model.row_noise import RowDropout
from mm_utils.objectives.terms import Batch


def build_classifier(
    args: ClassifierArguments, classes: Sequence[str], *, has_texts: bool
) -> FusionDualEncoderForClassification:
    """Load a model and add a classifier for `classes`, ready to be trained.

    Raises:
        ValueError: if there is no such model, or the classifier's input is missing from the data or the model.
    """
    base = load_model(str(args.model_name_or_path), needs_texts=has_texts).float()
    config = copy.deepcopy(base.config)
    config.classifier_inputs = _choose_inputs(args.classifier_inputs, base, has_texts)
    config.classifier_dropout = args.classifier_dropout
    config.id2label = dict(enumerate(classes))  # num_labels follows from it
    config.label2id = {name: number for number, name in enumerate(classes)}
    model = FusionDualEncoderForClassification(config, base.vision_model, base.text_model)
    model.load_state_dict(base.state_dict(), strict=False)  # the classifier is new
    RowDropout.replace(model.classifier)  # so that its masks are the same on any number of processes
    if config.classifier_inputs == "image":
        model.leave_texts_out()
    make_trainable(model, args)
    return model


def open_classifier(name: str) -> Any:
    """Return the classifier of media alone of `--model_name_or_path`, in evaluation mode, with its processor.

    Raises:
        ValueError: if it is another model, or there is none.
    """
    config = check_model(name)
    title = f"--output_file is for the classes of a folder, and --model_name_or_path is {name}"
    if FusionDualEncoderForClassification.__name__ not in (config.architectures or ()):
        raise ValueError(f"{title}; that is no classifier. Train one with scripts/finetune.py, or give --index_dir.")
    if config.classifier_inputs != "image":
        raise ValueError(
            f"{title}; it classifies {config.medium}s with a text each. Call its method predict in Python."
        )
    model = load_model(name, kind=FusionDualEncoderForClassification, needs_texts=False).eval()
    model.processor = load_processor_of(name)
    return model


def classify(model: FusionDualEncoderForClassification, batch: Batch) -> Tensor:
    """Return the logits `[B, classes]` of a batch; what frozen towers have stored is read (`training.feature_cache`)."""
    reads = model.config.classifier_inputs
    is_fused = reads == "fused"
    image = model.project_image(*vision_features(model, batch, is_fused))
    if reads == "image":
        return model.classify_encoded(image)
    text = stored_text(model, batch, is_fused)
    if text is None:
        text = model.encode_text(batch["input_ids"], batch["attention_mask"], is_fused)
    return model.classify_encoded(image, text, batch["attention_mask"])


def _choose_inputs(wanted: str | None, base: FusionDualEncoderModel, has_texts: bool) -> str:
    if wanted in ("fused", "pair") and not has_texts:
        raise ValueError(
            f"--classifier_inputs is {wanted}; the data has no texts. Give data that has, or drop the flag."
        )
    if wanted == "fused" and base.fusion is None:
        raise ValueError("--classifier_inputs is fused; the model has no fusion head. Choose pair, or another model.")
    return wanted or ("image" if not has_texts else "pair" if base.fusion is None else "fused")
