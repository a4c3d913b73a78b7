"""The closed form beside a plain reference, and the classes that a backbone knows by name beside the stock classifier."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForAudioClassification, AutoModelForImageClassification

from mm_utils.model.modeling_fusion_dual_encoder import pool_output
from mm_utils.training.class_names import TEMPERATURE, read_classes
from mm_utils.training.closed_form import FOLDS, Features, Maps, fit
from tests.kit.models import IMAGE, TOWER


def pairs(images: int = 60, captions: int = 1, noise: float = 0.3, seed: int = 0, names: bool = False) -> Features:
    """Features of 12 and 9 channels that share four directions, a mean, and noise."""
    draw = torch.Generator().manual_seed(seed)
    latent = torch.randn(images, 4, generator=draw)
    owner = torch.arange(images).repeat_interleave(captions)

    def side(channels: int, rows: Tensor) -> Tensor:
        mixing = torch.randn(4, channels, generator=draw)
        others = torch.randn(len(rows), channels, generator=draw)
        return rows @ mixing + noise * others + torch.linspace(1, 3, channels)

    text = side(9, latent[owner])
    return Features(side(12, latent), text, owner, text[::captions].clone() if names else None)


def inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.rsqrt()) @ vectors.T


def without_mean(rows: Tensor) -> Tensor:
    """Rows of unit length without the direction of their mean."""
    rows = F.normalize(rows.double(), dim=-1)
    direction = F.normalize(rows.mean(0), dim=0)
    return rows - torch.outer(rows @ direction, direction)


def reference_scores(features: Features, shrinkage: float, width: int) -> Tensor:
    """Inner products of mapped images and captions, by symmetric inverse roots and a full decomposition."""
    image, text = without_mean(features.image_MA), without_mean(features.text_TB)
    roots = []
    for rows in (image, text):
        covariance = rows.T @ rows / len(rows)
        mean_variance = covariance.trace() / len(covariance)
        roots.append(
            inverse_root(covariance + shrinkage * mean_variance * torch.eye(len(covariance), dtype=torch.double))
        )
    left, values, right = torch.linalg.svd(roots[0] @ image.T @ text / len(image) @ roots[1])
    strength = torch.diag(values[:width])
    return (image @ roots[0] @ left[:, :width]) @ strength @ (text @ roots[1] @ right.T[:, :width]).T


def scores(features: Features, maps: tuple[Tensor, Tensor]) -> Tensor:
    unit = features.unit()
    return (unit.image_MA @ maps[0]) @ (unit.text_TB @ maps[1]).T


@pytest.mark.parametrize("shrinkage", [0.1, 3.0])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_maps_are_those_of_a_plain_reference(shrinkage: float, width: int) -> None:
    features = pairs()
    maps = Maps(features.unit().moments()).of(shrinkage, 0.0, width)
    torch.testing.assert_close(scores(features, maps), reference_scores(features, shrinkage, width), rtol=0, atol=1e-7)
    assert [tuple(side.shape) for side in maps] == [(12, width), (9, width)]


def test_an_image_counts_once_however_many_captions_it_has() -> None:
    features = pairs(captions=2).unit()
    repeated = torch.cat([torch.arange(len(features.text_TB)), torch.arange(10)])
    owner, order = features.owner_T[repeated].sort(stable=True)
    weight, _, _, image_AA, *_ = Features(features.image_MA, features.text_TB[repeated[order]], owner).moments()
    torch.testing.assert_close(image_AA, features.image_MA.T @ features.image_MA)
    assert weight == pytest.approx(60)


def test_pairs_left_out_tell_signal_from_noise() -> None:
    chance = FOLDS / 400
    signal, noise = fit(pairs(400, noise=0.1), 4), fit(pairs(400, noise=100.0), 4)
    assert min(signal.recalls) > 0.5
    assert max(noise.recalls) < 5 * chance
    assert signal.scale > noise.scale
    assert signal.candidates == 100


def test_names_weigh_as_much_as_they_tell() -> None:
    few = pairs(40, noise=2.0, names=True)
    truth = pairs(40, noise=0.0, names=True).names_MB
    random = torch.randn(40, 9, generator=torch.Generator().manual_seed(1))
    assert fit(dataclasses.replace(few, names_MB=truth), 4).name_weight > 0
    assert fit(dataclasses.replace(few, names_MB=random), 4).name_weight == 0
    constant = fit(dataclasses.replace(few, names_MB=torch.ones(40, 9)), 4)  # names without any difference add nothing
    torch.testing.assert_close(constant.image_AE, fit(dataclasses.replace(few, names_MB=None), 4).image_AE)


@pytest.mark.parametrize("side", ["image_MA", "text_TB"])
def test_features_that_are_all_alike_or_not_finite(side: str) -> None:
    features = pairs(40, names=True)
    rows = getattr(features, side)
    found = fit(dataclasses.replace(features, **{side: torch.ones_like(rows)}), 4)
    assert not found.image_AE.any()
    assert not found.text_BE.any()
    with pytest.raises(ValueError, match="is not finite"):
        fit(dataclasses.replace(features, **{side: rows / 0}), 4)
    with pytest.raises(ValueError, match="is not finite"):
        fit(dataclasses.replace(features, names_MB=torch.full((40, 9), float("nan"))), 4)


# -- class names ---------------------------------------------------------------------------------------------------------
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
    classes = read_classes(str(tmp_path), tower, partial(pool_output, pooling=pooling))
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
    assert read_classes(str(tmp_path), tower or AutoModel.from_pretrained(tmp_path), FIRST) is None
