"""Starts in closed form, beside a plain reference, from names of classes, and weights between a run's start and its end."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoTokenizer,
    CLIPModel,
)

from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.reranking import DirectionRanks
from mm_utils.model.arguments import ModelArguments, ObjectiveArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, pool_output
from mm_utils.model.processor import train_tokenizer
from mm_utils.objectives.build import build_objective
from mm_utils.training import closed_form
from mm_utils.training.class_names import TEMPERATURE, read_classes
from mm_utils.training.closed_form import FOLDS, Features, Maps, fit, stack
from mm_utils.training.starts import (
    ALPHAS,
    interpolate,
    nearest_to_start,
    paired_features,
    start_projections,
    weights_of_start,
)
from scripts import eval_retrieval, pretrain
from tests.kit.corpora import COLOURS, SHAPES
from tests.kit.models import IMAGE, TOWER, write_towers
from tests.kit.numbered_rows import new_tokenizer, rows_of, training_data
from tests.kit.processes import logged, run_on_ranks
from tests.kit.processes import rows_of as logged_rows
from tests.kit.processes import weights as saved_weights
from tests.kit.stock_folders import write_stock


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tokenizer = train_tokenizer([f"a {colour} {shape}, number one" for colour in COLOURS for shape in SHAPES], 200)
    return write_towers(tmp_path_factory.mktemp("towers"), "vit", [*COLOURS, *SHAPES], tokenizer)


def joined(towers: dict[str, str], **changes: Any) -> FusionDualEncoderModel:
    torch.manual_seed(0)
    args = ModelArguments(**towers, fusion_layers=0, **changes)  # type: ignore[arg-type]
    return build_model(args, train_tokenizer(["a"], 100))


def data_of(towers: dict[str, str], images: int = 12) -> TrainingData:
    """Images of which two cannot be decoded, each with 1 to 4 captions."""
    processor = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(towers["text_model_name_or_path"]))
    rows = tokenize_captions(rows_of(images, broken=[2, 7]), processor.tokenizer, 16)
    return training_data(rows, 4, processor=processor, size=32)


def test_a_residual_projection_starts_from_the_same_cosines(towers: dict[str, str]) -> None:
    Accelerator(cpu=True)
    data = data_of(towers)
    cosines = []
    [batch] = data.loaders.evaluation(data.splits["train"], 20)
    for projection in ("linear", "mlp"):
        model = joined(towers, projection=projection)
        start_projections(100, towers["vision_model_name_or_path"], data, model, Accelerator())
        model.eval().double()
        with torch.no_grad():
            image_ME, _ = model.encode_image(batch["pixel_values"].double())
            cosines.append(image_ME @ model.encode_text(batch["input_ids"], batch["attention_mask"])[0].T)
    torch.testing.assert_close(*cosines, rtol=0, atol=1e-4)
    assert cosines[0].std() > 0.1


def test_images_are_fitted_to_texts_that_are_frozen(towers: dict[str, str]) -> None:
    """The images' map is that of the fit to the texts' embeddings, which stay."""
    Accelerator(cpu=True)
    data = data_of(towers)
    model = joined(towers)
    name = towers["vision_model_name_or_path"]
    before = model.text_projection.requires_grad_(False).weight.clone()
    features = paired_features(model, 100, data, Accelerator(), name)
    start_projections(100, name, data, model, Accelerator())
    assert torch.equal(model.text_projection.weight, before)
    [batch] = data.loaders.evaluation(data.splits["train"], 20)
    with torch.no_grad():
        image_ME, _ = model.eval().encode_image(batch["pixel_values"])
        text_TE, _ = model.encode_text(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(features.text_TB, text_TE)
    unit = features.unit()
    found = closed_form.fit(features, model.config.projection_dim)
    expected_ME = unit.image_MA @ found.image_AE @ found.text_BE.T
    torch.testing.assert_close(torch.nn.functional.normalize(expected_ME, dim=-1).float(), image_ME)


def start_on_rank(towers: dict[str, str]) -> list[Any]:
    """The temperature, what the maps give of all features, and these: single directions of equal strength may turn into each other."""
    Accelerator(cpu=True)
    data = data_of(towers)
    model = joined(towers)
    name = towers["vision_model_name_or_path"]
    start_projections(100, name, data, model, Accelerator())
    found = paired_features(model, 100, data, Accelerator(), name)
    with torch.no_grad():
        scores = model.visual_projection(found.image_MA) @ model.text_projection(found.text_TB).T
    return [model.logit_scale.detach(), scores, found.image_MA, found.text_TB, found.owner_T, found.names_MB]


def test_the_start_is_the_same_on_any_number_of_processes(towers: dict[str, str]) -> None:
    alone = start_on_rank(towers)
    assert len(alone[2]) == len(alone[5]) == 10
    for found in run_on_ranks(2, start_on_rank, towers):
        assert torch.equal(found[0], alone[0])
        for one, other in zip(alone, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


# -- whole runs ---------------------------------------------------------------------------------------------------------


def flags_of(towers: dict[str, str], tiny_flags: list[str], folder: Path, *more: str) -> list[str]:
    paths = [word for name, value in towers.items() for word in (f"--{name}", value)]
    return [*tiny_flags, *paths, "--output_dir", str(folder), "--learning_rate", "0.5", *more]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_begins_with_its_baseline_and_does_not_end_below_it(
    frozen: bool, towers: dict[str, str], tiny_flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The learning rate destroys towers and projections, and those of the start are saved, with a head that was trained."""
    more = ["--freeze_vision", "--freeze_text"] if frozen else []
    metrics = pretrain.main(flags_of(towers, tiny_flags, tmp_path / "run", *more))
    found = logged(tmp_path / "run", "eval_mean_recall")
    assert list(found) == [0, 1, 2, 3, 4]
    assert metrics["eval_mean_recall"] == max(found.values()) == found[0]
    saved = FusionDualEncoderModel.from_pretrained(tmp_path / "run").state_dict()
    begin = 0 if frozen else 2  # of the head's stage
    first = FusionDualEncoderModel.from_pretrained(tmp_path / "run" / f"checkpoint-{begin}").state_dict()
    head = {name for name in first if name.startswith(("fusion.", "token_head.", "caption_adapter."))}
    assert all(torch.equal(saved[name], first[name]) for name in first.keys() - head)
    assert not all(torch.equal(saved[name], first[name]) for name in head)
    *_, evaluated, chosen = logged_rows(tmp_path / "run")
    assert evaluated["step"] == 4  # the evaluation behind the pictures is not logged twice
    assert (chosen["saved_part"], chosen["saved_projections_step"]) == ("head", begin)
    sentence = f"The model with the fusion head of step {chosen['saved_step']} is saved, "
    assert sentence in caplog.text
    assert sentence in (tmp_path / "run" / "README.md").read_text()
    assert ("trained from the first step on, without --head_share" in caplog.text) == frozen


# -- weights between the start and the end --------------------------------------------------------------------------------


def tiny(**fields: Any) -> FusionDualEncoderModel:
    return build_model(ModelArguments(image_size=16, **fields), new_tokenizer())


def test_a_head_that_was_never_trained_is_not_interpolated() -> None:
    new = tiny(fusion_layers=1)
    objectives = ObjectiveArguments("contrastive:1,captioning:1")
    towers = {*("vision_model", "text_model", "visual_projection", "text_projection", "logit_scale")}
    assert {name.split(".")[0] for name in weights_of_start(new)} == towers
    added = build_objective(new, objectives, 0).added
    assert {name.split(".")[0] for name in weights_of_start(new, added)} == towers
    assert {name.split(".")[0] for name in weights_of_start(new)} >= {"fusion", "caption_adapter"}
    again = build_objective(new, objectives, 0).added  # a model whose head was trained
    assert weights_of_start(new, again).keys() == weights_of_start(new).keys()


def test_pre_training_saves_the_best_weights_between_its_start_and_its_end(
    scratch_run: tuple[Path, dict[str, float]], tiny_flags: list[str], tmp_path: Path
) -> None:
    begun, before = scratch_run
    model = ["--model_name_or_path", str(begun), "--learning_rate", "1e-2", "--save_steps", "2"]
    run = [*tiny_flags[:2], *tiny_flags[4:], *model]
    pretrain.main([*run, "--eval_steps", "0", "--output_dir", str(tmp_path / "plain")])
    flags = [*run, "--wise_ft", "--eval_steps", "0"]
    metrics = pretrain.main([*flags, "--output_dir", str(tmp_path / "wise")])
    start = saved_weights(begun)
    end = saved_weights(tmp_path / "plain")
    found = saved_weights(tmp_path / "wise")
    report = json.loads((tmp_path / "wise/wise_ft.json").read_text())
    right = interpolate(start, end, report["saved_alpha"])
    torch.testing.assert_close({name: found[name] for name in right}, right)
    assert [row["alpha"] for row in report["measured"]] == [0, 0.25, 0.5, 0.75, 1]
    recalls = [row["mean_recall"] for row in report["measured"]]
    assert recalls[0] == before["eval_mean_recall"]
    assert recalls[-1] == logged_rows(tmp_path / "plain")[-1]["eval_mean_recall"]
    assert metrics["eval_mean_recall"] == recalls[int(4 * report["saved_alpha"])]
    [first] = [row for row in logged_rows(tmp_path / "wise") if row["step"] == 0 and "eval_mean_recall" in row]
    assert first["eval_mean_recall"] == recalls[0]
    resume = ["--resume_from_checkpoint", str(tmp_path / "wise/checkpoint-2")]
    assert pretrain.main([*flags, *resume, "--output_dir", str(tmp_path / "again")]) == metrics


@pytest.mark.parametrize(
    ("figures", "ranks", "chosen"),
    [
        ([0.5, 0.6, 0.7, 0.7, 0.6], None, 0.5),  # equal ones
        ([0.5] * 5, None, 0.0),
        ([-0.5, -0.4, -0.3, -0.2, -0.1], None, 1.0),  # a loss, turned round
        ([0.1, 0.2, 0.3, 0.4, 0.5], [20, 20, 20, 1, 1], 0.75),  # alpha 0.75 has the same ranks as the best
        ([0.1, 0.2, 0.3, 0.4, 0.5], [20, 20, 20, 20, 1], 1.0),
        ([0.1, 0.1, 0.1, 0.1, 0.2], [1, 1, 1, 1, 1], 0.0),
    ],
)
def test_what_validation_cannot_tell_apart_is_not_changed(
    figures: list[float], ranks: list[int] | None, chosen: float
) -> None:
    found = dict(zip(ALPHAS, figures, strict=True))
    of_split = {}
    if ranks is not None:
        queries = SimpleNamespace(group=torch.arange(30))
        every = (DirectionRanks(queries, torch.full((30,), rank)) for rank in ranks)
        of_split = {alpha: {"text_to_image": each} for alpha, each in zip(ALPHAS, every, strict=True)}
    assert nearest_to_start(found, of_split, "mean_recall") == chosen


# -- the closed form beside a plain reference --------------------------------------------------------------------------
def pairs(images: int = 60, captions: int = 1, noise: float = 0.3, seed: int = 0, names: bool = False) -> Features:
    """Features of 12 and 9 channels that share four directions, a mean, and noise."""
    draw = torch.Generator().manual_seed(seed)
    latent = torch.randn(images, 4, generator=draw)
    owner = torch.arange(images).repeat_interleave(captions)

    def side(channels, rows):
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
    image = without_mean(features.image_MA)
    text = without_mean(features.text_TB)
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
    signal = fit(pairs(400, noise=0.1), 4)
    noise = fit(pairs(400, noise=100.0), 4)
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


# -- what a model knew beside what the pairs say ------------------------------------------------------------------------


def test_the_cosine_of_two_blocks_is_the_mean_of_theirs() -> None:
    """Where all outputs of a block have one norm, it is so exactly."""
    draw = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(9, 9, generator=draw, dtype=torch.double))[0]
    other = torch.linalg.qr(torch.randn(9, 9, generator=draw, dtype=torch.double))[0]
    rows = F.normalize(torch.randn(50, 9, generator=draw, dtype=torch.double), dim=-1)
    features = Features(rows, rows.flip(0), torch.arange(50))
    known = (3 * turn, turn)
    fitted = (other, 5 * other)
    stacked = scores(features, stack(known, fitted, 0.3, features))
    torch.testing.assert_close(stacked, 0.7 * scores(features, (turn, turn)) + 0.3 * scores(features, (other, other)))
    assert stack(known, fitted, 0.0, features) is known
    assert stack(known, fitted, 1.0, features) is fitted


def test_the_weight_of_the_pairs_follows_from_what_each_side_knows() -> None:
    every = pairs(2040, noise=2.0).unit()
    few = every.take(torch.arange(2040) >= 2000)
    many = every.take(torch.arange(2040) < 2000)
    knowing = Maps(many.moments()).of(0.1, 0.0, 4)
    draw = torch.Generator().manual_seed(1)
    ignorant = tuple(torch.randn(channels, 4, generator=draw, dtype=torch.double) for channels in (12, 9))
    assert fit(few, 4, knowing).pair_weight < fit(few, 4, ignorant).pair_weight
    assert fit(many, 4, ignorant).pair_weight == 1
    alone = fit(many, 4)
    torch.testing.assert_close(fit(many, 4, ignorant).image_AE, alone.image_AE)


@pytest.mark.parametrize(("kind", "adds"), [("clip", True), ("siglip", True), ("siglip", False)])
def test_a_whole_model_between_frozen_towers_keeps_what_it_knew(
    kind: str, adds: bool, tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model as it is is measured first; the saved one opens in a stock class; a resumed run ends with the same weights."""
    if not adds:  # the pairs say nothing
        without_pairs = lambda *given: dataclasses.replace(fit(*given), pair_weight=0.0)  # noqa: E731
        monkeypatch.setattr("mm_utils.training.starts.fit", without_pairs)
    stock = write_stock(tmp_path / kind, kind)
    frozen = ["--freeze_vision", "--freeze_text", "--cache_features", "--objectives", "contrastive:1"]
    flags = [*tiny_flags[:2], *tiny_flags[4:10], "--model_name_or_path", stock, *frozen, "--save_steps", "2"]
    flags += ["--fusion_layers", "0"]
    pretrain.main([*flags, "--output_dir", str(tmp_path / "run")])
    before, *_ = logged_rows(tmp_path / "run")
    plain = eval_retrieval.main([*tiny_flags[:2], "--model_name_or_path", stock, "--split", "validation"])
    assert (before["step"], before["eval_mean_recall"]) == (0, plain["mean_recall"])
    model = FusionDualEncoderModel.from_pretrained(tmp_path / "run").eval()
    if kind == "clip":  # SiglipModel has no projection of images
        pixels = torch.randn(2, 3, 32, 32)
        opened = CLIPModel.from_pretrained(tmp_path / "run/dual_encoder").eval()
        found = opened.get_image_features(pixel_values=pixels).pooler_output
        torch.testing.assert_close(F.normalize(found, dim=-1), model.encode_image(pixels)[0], rtol=0, atol=1e-6)
    known = 24 if kind == "clip" else 32
    assert model.config.projection_dim > known if adds else model.config.projection_dim == known
    assert adds or model.config.dual_encoder_type == "siglip"
    resume = ["--resume_from_checkpoint", str(tmp_path / "run/checkpoint-2")]
    pretrain.main([*flags, *resume, "--output_dir", str(tmp_path / "again")])
    again = saved_weights(tmp_path / "again")
    for name, weight in saved_weights(tmp_path / "run").items():
        assert torch.equal(again[name], weight), name


# -- class names ---------------------------------------------------------------------------------------------------------
NAMES = {0: "tench, Tinca tinca", 1: "great white shark", 2: "cock"}
SMALL = TOWER | IMAGE
KINDS = {
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
    runs = []
    tower.register_forward_hook(lambda *_: runs.append(None))
    images = torch.randn(3, 32, 32) if kind.startswith("audio") else torch.randn(3, 3, 32, 32)
    classes = read_classes(str(tmp_path), tower, partial(pool_output, pooling=pooling))
    assert classes is not None
    assert classes.names == list(NAMES.values())
    runs.clear()
    for part in images.split(2):
        output = tower(part, output_hidden_states=True)
        expected = (stock(part).logits / TEMPERATURE).softmax(-1)
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
