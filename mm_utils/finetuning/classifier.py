"""Build a classifier on top of a trained model."""

import copy
from collections.abc import Sequence

from mm_utils.finetuning.arguments import ClassifierArguments
from mm_utils.model.build import load_model, make_trainable
from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderForClassification,
    FusionDualEncoderModel,
)
from mm_utils.model.row_noise import RowDropout


def build_classifier(
    args: ClassifierArguments, classes: Sequence[str], *, has_texts: bool
) -> FusionDualEncoderForClassification:
    """Load a model and add a classifier for `classes`, ready to be trained.

    Raises:
        ValueError: if there is no such model, or the classifier's input is missing from the data or the model.
    """
    base = load_model(str(args.model_name_or_path)).float()
    config = copy.deepcopy(base.config)
    config.classifier_inputs = _choose_inputs(args.classifier_inputs, base, has_texts)
    config.classifier_dropout = args.classifier_dropout
    config.id2label = dict(enumerate(classes))  # num_labels follows from it
    config.label2id = {name: number for number, name in enumerate(classes)}
    model = FusionDualEncoderForClassification(config, base.vision_model, base.text_model)
    model.load_state_dict(base.state_dict(), strict=False)
    RowDropout.replace(model.classifier)  # so that its masks are the same on any number of processes

    make_trainable(model, args)
    return model


def _choose_inputs(wanted: str | None, base: FusionDualEncoderModel, has_texts: bool) -> str:
    if wanted in ("fused", "pair") and not has_texts:
        raise ValueError(
            f"--classifier_inputs is {wanted}; the data has no texts. Give data that has, or drop the flag."
        )
    if wanted == "fused" and base.fusion is None:
        raise ValueError("--classifier_inputs is fused; the model has no fusion head. Choose pair, or another model.")
    return wanted or ("image" if not has_texts else "pair" if base.fusion is None else "fused")
