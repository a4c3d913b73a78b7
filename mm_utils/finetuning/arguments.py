"""The flags of fine-tuning and of zero-shot classification."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from mm_utils.arguments import arg, required
from mm_utils.data.arguments import SPLIT_NAMES
from mm_utils.model.arguments import CLASSIFIER_INPUTS, TowerArguments


@dataclass
class LabelArguments:
    """The column of labels. A row has a label and a medium, and perhaps a text (--caption_column)."""

    label_column: str | None = arg(
        None, "Column of classes or answers; found by type (ClassLabel) or usual names.", usual=True
    )


@dataclass
class ZeroShotArguments(LabelArguments):
    """Labelled images, clips or sounds, and the texts that stand for their classes."""

    split: str | None = arg(
        None,
        "Split; default: the first there is of validation, test and train. A validation split that is not there: what finetune.py holds out.",
    )
    classes: str | None = arg(
        None,
        "A file of names: lines 'id name' for folders such as n01440764, or one name a line in the order of the labels, or CSV with "
        "a header, JSON or YAML. Default: the names that the data has.",
    )
    templates: list[str] | None = field(
        default=None,
        metadata={
            "help": "Texts with {} in place of the class's name, or one file with a text per line, as CLIP_benchmark writes it; default: "
            "'a photo of a {}.' and two like it, or such of clips and sounds."
        },
    )

    def __post_init__(self) -> None:
        if self.split is not None and self.split.lower() not in SPLIT_NAMES:
            raise ValueError(f"--split is {self.split}; a split is train, validation or test. Choose one of them.")
        given = ", ".join(self.templates or ())
        is_file = os.path.isfile(given)
        if is_file:
            lines = Path(given).read_text(encoding="utf-8-sig").splitlines()
            self.templates = [line.strip().replace("{c}", "{}") for line in lines if line.strip()]
        if self.templates == []:
            raise ValueError(
                f"--templates is {given}; the file is empty. Write a template a line, such as 'a photo of {{}}'."
            )
        without = [template for template in self.templates or () if "{}" not in template]
        if without:
            where = f"{given}, line '{without[0]}'" if is_file else without[0]
            raise ValueError(f"--templates is {where}; a template says with {{}} where the name goes. Add it.")


@dataclass
class ClassifierArguments(TowerArguments):
    """The model to start from, and the input of its classifier."""

    model_name_or_path: str = required(
        "The model to start from: the output folder of pretrain, a checkpoint, or a Hub id.", usual=True
    )
    classifier_inputs: str | None = arg(
        None,
        "Input of the classifier: fused (the fusion head's [CLS] on image and text), pair (both embeddings side by side), "
        "or image. Default: fused if the data and the model allow it, else pair, or image where there are no texts.",
        decides="place",
        usual=True,
    )
    classifier_dropout: float = arg(0.1, "Dropout before the last layer of the classifier.", most=0.999)

    def __post_init__(self) -> None:
        if self.classifier_inputs not in (None, *CLASSIFIER_INPUTS):
            choices = ", ".join(CLASSIFIER_INPUTS)
            raise ValueError(f"--classifier_inputs is {self.classifier_inputs!r}; choose one of {choices}.")
