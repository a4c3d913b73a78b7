"""The classes that a backbone knows by name, beside the stock classifier."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForAudioClassification, AutoModelForImageClassification

from mm_utils.model.modeling_fusion_dual_encoder import pool_output
from mm_utils.training.class_names import TEMPERATURE, read_classes
from tests.kit.models import IMAGE, TOWER

NAMES = {0: "tench, Tinca tinca", 1: "great white shark", 2: "cock"}
SMALL = TOWER | IMAGE
KINDS: dict[str, dict[str, Any]] = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "vit": SMALL,
    "dinov2": SMALL,
    "audio-spectrogram-transformer": {**SMALL, "max_length": 32, "num_mel_bins": 32},
}

FIRST = partial(pool_output, pooling="cls")


def classifier(kind: str, folder: Path, names: dict[int, str] = NAMES) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **KINDS[kind], id2label=names, label2id={name: at for at, name in names.items()}
    )
    kinds = AutoModelForAudioClassification if kind.startswith("audio") else AutoModelForImageClassification
    model = kinds.from_config(config).eval()
    if kind.startswith("audio"):  # a norm that is not the identity
        torch.nn.init.normal_(model.classifier.layernorm.weight)
        torch.nn.init.normal_(model.classifier.layernorm.bias)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "pooling"), [*((kind, "pooler") for kind in KINDS), ("vit", "cls"), ("dinov2", "cls")]
)
@torch.no_grad()
def test_probabilities_are_those_of_the_stock_classifier(kind: str, pooling: str, tmp_path: Path) -> None:
    """Where the classifier reads no more than what the model pools, that is enough."""
    stock = classifier(kind, tmp_path)
    tower = AutoModel.from_pretrained(tmp_path).eval()
    runs: list[None] = []
    tower.register_forward_hook(lambda *_: runs.append(None))
    images = torch.randn(3, 32, 32) if kind.startswith("audio") else torch.randn(3, 3, 32, 32)
    with read_classes(str(tmp_path), tower, partial(pool_output, pooling=pooling)) as classes:
        assert classes is not None
        assert classes.names == list(NAMES.values())
        runs.clear()
        for part in images.split(2):
            output, expected = tower(part, output_hidden_states=True), (stock(part).logits / TEMPERATURE).softmax(-1)
            torch.testing.assert_close(classes.probabilities(), expected, rtol=0, atol=1e-6)
        assert classes.reads_pooled == (kind != "dinov2" and (kind != "vit" or pooling == "cls"))
        pooled = pool_output(output, pooling)
        if classes.reads_pooled:
            torch.testing.assert_close(classes.probabilities(pooled), expected, rtol=0, atol=1e-6)
    assert len(runs) == 2
    assert len(tower._forward_hooks) == 1


@pytest.mark.parametrize("other", ["another tower", "another head", "no names", "no classifier"])
def test_a_classifier_that_does_not_fit_is_not_read(other: str, tmp_path: Path) -> None:
    """Its head would be random, or read what the tower does not give."""
    classifier("vit", tmp_path, {0: "LABEL_0", 1: "LABEL_1"} if other == "no names" else NAMES)
    if other == "no classifier":
        AutoModel.from_config(AutoConfig.for_model("vit", **KINDS["vit"], id2label=NAMES)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if other == "another head":
        config["architectures"] = ["DeiTForImageClassificationWithTeacher"]
    tower = (
        AutoModel.from_config(AutoConfig.for_model("dinov2", **KINDS["dinov2"])) if other == "another tower" else None
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with read_classes(str(tmp_path), tower or AutoModel.from_pretrained(tmp_path), FIRST) as classes:
        assert classes is None
