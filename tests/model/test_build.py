"""Models and processors from presets, pretrained backbones and saved models, and what is refused in one line."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    ASTFeatureExtractor,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoProcessor,
    AutoTokenizer,
    BertConfig,
    CLIPImageProcessor,
    CLIPModel,
    EfficientNetImageProcessor,
    PreTrainedTokenizerFast,
    Siglip2Tokenizer,
    SiglipConfig,
    SiglipModel,
    TimmWrapperConfig,
    TimmWrapperModel,
    VideoMAEImageProcessor,
    VisionTextDualEncoderProcessor,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
    VJEPA2VideoProcessor,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from mm_utils.data.batches.tokens import encode_captions
from mm_utils.data.media.medium import image_geometry, read_by
from mm_utils.data.media.riff import write_wav
from mm_utils.model import processor as processors
from mm_utils.model.adapt import load_weights, multiply_patches, use_channels_last
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, fit_positions, load_model, open_model
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import FramesTower, FusionDualEncoderModel, vision_tower
from mm_utils.model.pretrained import cut_texts_at, load_tower
from mm_utils.model.processor import (
    SPECIAL_TOKENS,
    cached_tokenizer,
    load_processor,
    load_processor_of,
    train_tokenizer,
)
from mm_utils.model.reading import center_square
from mm_utils.model.stock import to_dual_encoder
from scripts import pretrain
from tests.kit.media_files import animation
from tests.kit.models import IMAGE, TOWER, TOWERS
from tests.kit.stock_folders import chinese_tokenizer, noise, write_clap, write_stock

MEAN = [0.1, 0.2, 0.3]
STD = [0.9, 0.8, 0.7]
NO_TOKENIZER = None


CAPTIONS = [
    f"{text} number {number}"
    for number in range(20)
    for text in ("A red circle left of a blue square,", "Ein größerer grüner Kreis über der Brücke:")
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(CAPTIONS, 200)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "tandem_tokenizers"


def build(medium: str = "image", seconds: float | None = None, **fields: Any) -> tuple[FusionDualEncoderModel, Any]:
    args = ModelArguments(**fields)
    processor = load_processor(args, CAPTIONS, medium, seconds)
    model = build_model(args, processor.tokenizer, medium=medium).eval()
    model.processor = processor
    return model, processor


def bert(vocabulary: int) -> Any:
    return AutoModel.from_config(BertConfig(**TOWER, vocab_size=vocabulary))


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours = one.state_dict()
    theirs = other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name].to(value.dtype)) for name, value in ours.items())


# -- backbones ----------------------------------------------------------------------------------------------------------


def test_pretrained_backbones_keep_their_weights_and_their_normalisation(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    vision = str(tmp_path / "vision")
    text = str(tmp_path / "text")
    ViTModel(ViTConfig(**TOWER, **IMAGE)).save_pretrained(vision)
    ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=MEAN, image_std=STD).save_pretrained(vision)
    bert(len(tokenizer)).half().save_pretrained(text)
    tokenizer.save_pretrained(text)
    model, processor = build(vision_model_name_or_path=vision, text_model_name_or_path=text)
    assert_same_weights(model.vision_model, AutoModel.from_pretrained(vision))
    assert_same_weights(model.text_model, AutoModel.from_pretrained(text))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.freeze_batch_norm
    assert image_geometry(processor) == (32, pytest.approx(MEAN), pytest.approx(STD))
    assert processor.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(text).get_vocab()


@pytest.mark.parametrize("start", ["scratch", "bert", "clip", "chinese_clip", "siglip"])
def test_added_tokens_are_one_token_each_and_travel_with_the_model(
    start: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    fields = {}
    if start == "bert":
        bert(len(tokenizer)).save_pretrained(tmp_path / "bert")
        tokenizer.save_pretrained(tmp_path / "bert")
        fields["text_model_name_or_path"] = str(tmp_path / "bert")
    elif start != "scratch":
        fields["model_name_or_path"] = write_stock(tmp_path / start, start)
    before, _ = build(**fields)
    model, processor = build(**fields, add_tokens="<en>, <de>")
    own = processor.tokenizer
    rows = model.text_model.get_input_embeddings().weight
    assert len(rows) == len(own) == model.config.text_config.vocab_size
    new = own.convert_tokens_to_ids(["<en>", "<de>"])
    tagged = encode_captions(own, ["a circle", "<en> a circle", "<de> a circle", "<fr> a circle"], 64)
    for ids, expected in zip(tagged, ([], new[:1], new[1:], []), strict=True):
        assert [token for token in ids if token in new] == expected
    if start != "scratch":
        known = before.text_model.get_input_embeddings().weight
        assert torch.equal(rows[: len(known)], known)
        assert torch.allclose(rows[len(known) :], known.mean(0))
    model.save_pretrained(tmp_path / "saved")
    for again in ({}, {"add_tokens": "<en>,<de>"}):  # which has them already
        loaded, other = build(model_name_or_path=str(tmp_path / "saved"), **again)
        assert encode_captions(other.tokenizer, ["<de> a circle"], 64) == [tagged[2]]
        assert torch.equal(loaded.text_model.get_input_embeddings().weight, rows)


def test_towers_of_two_tower_checkpoints_are_loaded(tmp_path: Path) -> None:
    clip = write_stock(tmp_path / "clip", "clip")
    siglip = str(tmp_path / "siglip")
    AutoImageProcessor.from_pretrained(clip).save_pretrained(clip)
    whole = CLIPModel.from_pretrained(clip)
    model, processor = build(vision_model_name_or_path=clip, text_model_name_or_path=clip)
    for ours, theirs in ((model.vision_model, whole.vision_model), (model.text_model, whole.text_model)):
        named = {name.partition("_model.")[2] or name: value for name, value in ours.state_dict().items()}
        assert all(torch.equal(value, named[name]) for name, value in theirs.state_dict().items() if name in named)
        assert len(named) == len(theirs.state_dict())
    assert (model.config.vision_pooling, model.config.text_pooling) == ("pooler", "pooler")
    assert image_geometry(processor)[0] == 32
    text = {**TOWER, "vocab_size": 100, "projection_size": 32}
    SiglipModel(SiglipConfig(text_config=text, vision_config={**TOWER, **IMAGE})).save_pretrained(siglip)
    with pytest.raises(ValueError, match=r"--text_model_name_or_path is .*; AutoModel knows no siglip_text_model"):
        build_model(ModelArguments(text_model_name_or_path=siglip), NO_TOKENIZER)  # pools its last position, padding


def test_backbones_that_draw_or_mix_rows_are_refused() -> None:
    """ViT-MAE hides patches; Pixtral returns all images as one row; FNet mixes the tokens of padding into the text."""
    vit = AutoModel.from_config(AutoConfig.for_model("vit", **TOWER, **IMAGE))
    mae = AutoModel.from_config(AutoConfig.for_model("vit_mae", **TOWER, **IMAGE))
    pixtral = AutoModel.from_config(AutoConfig.for_model("pixtral", **TOWER, **IMAGE))
    fnet = AutoModel.from_config(AutoConfig.for_model("fnet", **TOWER, vocab_size=50))
    drawing = bert(50)
    drawing.get_input_embeddings().register_forward_hook(lambda *given: given[2] * torch.rand_like(given[2]))
    for vision, text, message in (
        (
            mae,
            bert(50),
            r"ViTMAEModel returns other outputs for the same input each time.*by ViTModel.from_pretrained",
        ),
        (vit, drawing, "BertModel returns other outputs.*draws random numbers"),
        (pixtral, bert(50), "does not keep the rows of a batch apart: .* depends on .*other images"),
        (vit, fnet, "does not keep the rows of a batch apart: .* depends on .*padding"),
    ):
        with pytest.raises(ValueError, match=message):
            join_backbones(vision, text)


def test_a_pooler_without_weights_is_not_used_and_other_missing_weights_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """ALBERT's pooler is not of BERT's kind, which would be passed over with or without weights."""
    vit = str(tmp_path / "vit")
    bare = str(tmp_path / "bare")
    full = str(tmp_path / "full")
    ViTModel(ViTConfig(**TOWER, **IMAGE), add_pooling_layer=False).save_pretrained(vit)
    for frozen in (False, True):
        args = ModelArguments(vision_model_name_or_path=vit, freeze_vision=frozen)
        with caplog.at_level(logging.INFO):
            model = build_model(args, tokenizer)
        assert model.config.vision_pooling == "mean"
        assert not any(parameter.requires_grad for parameter in model.vision_model.pooler.parameters())
    assert "it holds no weights of a pooler, so its outputs are pooled by their mean" in caplog.text
    sizes = {**TOWER, "embedding_size": 16, "vocab_size": len(tokenizer)}
    AlbertForMaskedLM(AlbertConfig(**sizes)).save_pretrained(bare)
    AutoModel.from_config(AlbertConfig(**sizes)).save_pretrained(full)
    assert [load_tower(name, "text")[1] for name in (full, bare)] == ["auto", "mean"]
    ViTModel(ViTConfig(**TOWER, **IMAGE)).save_pretrained(vit)
    ViTConfig(**{**TOWER, "num_hidden_layers": 3}, **IMAGE).save_pretrained(vit)
    with pytest.raises(ValueError, match=r"it lacks 16 weights of a vit, such as layers\.2\."):
        load_tower(vit, "vision")
    save_file({"odd.weight": torch.ones(2)}, f"{full}/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"--text_model_name_or_path is .*; it holds no weights of a albert"):
        load_tower(full, "text")


def test_a_timm_backbone_keeps_its_size_and_normalisation(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    architecture = "test_convnext"
    own = timm.get_pretrained_cfg(architecture).to_dict() | {"mean": MEAN, "std": STD}
    backbone = TimmWrapperModel(TimmWrapperConfig(architecture=architecture, pretrained_cfg=own)).eval()
    backbone.save_pretrained(tmp_path / "timm")
    model, processor = build(vision_model_name_or_path=str(tmp_path / "timm"))
    assert image_geometry(processor) == (160, pytest.approx(MEAN, abs=1e-5), pytest.approx(STD, abs=1e-5))
    model.save_pretrained(tmp_path / "run")
    pixels = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        right = backbone(pixels).pooler_output
        for each in (model, load_model(str(tmp_path / "run")).eval()):
            torch.testing.assert_close(each.vision_features(pixels)[0], right, rtol=0, atol=1e-5)


# -- images -------------------------------------------------------------------------------------------------------------
SIZES = [(64, 64), (65, 64), (75, 100), (333, 500), (31, 47), (300, 70)]
PROCESSORS = {
    "given": CLIPImageProcessor(image_mean=MEAN, image_std=STD),
    "without normalisation": ViTImageProcessor(do_normalize=False),
    "without rescaling": ViTImageProcessor(do_rescale=False, image_mean=[100.0] * 3, image_std=[50.0] * 3),
    "to 127.5": ViTImageProcessor(rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[1.0] * 3),
    "normalised twice": EfficientNetImageProcessor(image_mean=MEAN, image_std=STD),
}


def test_the_saved_processor_does_what_center_square_does() -> None:
    generator = np.random.default_rng(0)
    images = processors._image_processor(ModelArguments(image_size=64))
    for size in SIZES:
        coarse = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        image = coarse.resize(size, Image.Resampling.BICUBIC)
        theirs = images(images=image, return_tensors="pt")["pixel_values"][0]
        assert (center_square(image, 64) - (theirs * 0.5 + 0.5) * 255).abs().max() <= 2.01, size


@pytest.mark.parametrize("own", PROCESSORS.values(), ids=PROCESSORS)
def test_colours_get_the_values_that_the_backbone_wants(own: Any) -> None:
    ours = processors._center_square_processor(own)
    for colour in ((200, 100, 50), (0, 255, 7)):
        image = Image.new("RGB", (300, 300), colour)
        expected = own(image, return_tensors="pt")["pixel_values"][0, :, 100, 100].float()
        found = ours(image, return_tensors="pt")["pixel_values"][0, :, 100, 100].float()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- the tokenizer ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vocab_size", [30, 1000])
def test_training_a_tokenizer_is_deterministic(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer numbers letters in the order of a hash map that differs each time, and breaks ties by number."""
    others = ["Ça, c'est 一只红色的猫!", "Синий круг-над «квадратом» №7", "नीला घेरा", "e\u0301te\u0301 \U0001f600x"]
    captions = [*CAPTIONS, *others]
    assert len({train_tokenizer(iter(captions), vocab_size).backend_tokenizer.to_str() for _ in range(5)}) == 1
    tokenizer = train_tokenizer(captions, vocab_size)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS.values())
    monkeypatch.setattr(processors, "ALPHABET", 10)
    vocabulary = set(train_tokenizer(CAPTIONS, 30).get_vocab()) - {*SPECIAL_TOKENS.values()}
    assert len({token.removeprefix("##") for token in vocabulary if len(token.removeprefix("##")) == 1}) == 10


def test_a_tokenizer_is_trained_once_per_captions_and_size_of_an_even_sample(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(
        processors, "train_tokenizer", lambda captions, size: sizes.append(size) or train_tokenizer(captions, size)
    )
    many = [f"{caption} {number}" for number in range(4) for caption in CAPTIONS]
    monkeypatch.setattr(processors, "SAMPLE", len(CAPTIONS))
    found = {cached_tokenizer(iter(many), 150).backend_tokenizer.to_str() for _ in range(2)}
    assert found == {train_tokenizer(many[::4], 150).backend_tokenizer.to_str()}
    cached_tokenizer(many[1:], 150)
    cached_tokenizer(many, 120)
    assert sizes == [150, 150, 120]
    assert len(list(cache.rglob("tokenizer.json"))) == 3


# -- whole models -------------------------------------------------------------------------------------------------------
def test_a_whole_model_is_trained_in_float32_with_its_own_head(tmp_path: Path) -> None:
    small = str(tmp_path)
    model, processor = build(image_size=32, fusion_layers=1)
    model.bfloat16().save_pretrained(small)
    assert load_model(small).dtype == torch.bfloat16
    for same in ({}, {"fusion_layers": 1}):
        again = build_model(ModelArguments(small, **same), processor.tokenizer)
        assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
        assert again.config.fusion_layers == 1
    with pytest.raises(ValueError, match=r"--fusion_layers is 3; the head of .* and stays as it is"):
        build_model(ModelArguments(small, fusion_layers=3), processor.tokenizer)
    with pytest.raises(ValueError, match=r"--max_seq_length is 513; the text backbone has positions for 512 tokens"):
        fit_positions(model, 513)


def edited(folder: Path, name: str, **entries: Any) -> None:
    content = json.loads((folder / name).read_text())
    for place, value in entries.items():
        part, _, key = place.rpartition("__")
        (content[part] if part else content)[key] = value
    (folder / name).write_text(json.dumps(content))


def without(start: str) -> Callable[[Path], None]:
    def remove(folder):
        weights = load_file(folder / "model.safetensors")
        kept = {name: value for name, value in weights.items() if not name.startswith(start)}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return remove


def filled(start: str, value: float) -> Callable[[Path], None]:
    def fill(folder):
        weights = load_file(folder / "model.safetensors")
        changed = {name: each.fill_(value) if name.startswith(start) else each for name, each in weights.items()}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})

    return fill


def words_beyond(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"far": 100_000}
    (folder / "tokenizer.json").write_text(json.dumps(content))


WRONG = {
    "text_projection": (without("text_projection"), "lacks 1 weights .*text_projection.weight"),
    "text tower": (without("text_model.encoder"), r"lacks \d+ weights .*text_model.encoder"),
    "head": (without("fusion."), r"lacks \d+ weights .*fusion"),
    "words": (words_beyond, r"its tokenizer has ids up to 100,000, and its text encoder has \d+ words"),
    "std": (
        lambda folder: edited(folder, "processor_config.json", image_processor__image_std=[0, 0, 0]),
        r"a standard deviation of .0, 0, 0., does not make RGB images",
    ),
    "medium": (lambda folder: edited(folder, "config.json", medium="smell"), "medium is 'smell'; choose one of"),
    "padding": (
        lambda folder: edited(folder, "config.json", text_padding="left"),
        "text_padding is 'left'; it is null, or has",
    ),
    "NaN": (filled("visual_projection", math.nan), "visual_projection.weight in .*model.safetensors is not finite"),
    "infinity": (
        filled("text_model.embeddings", math.inf),
        r"text_model.embeddings\S* in .*model.safetensors is not finite",
    ),
    "zeros": (filled("text_", 0.0), "All weights of text_model in .*model.safetensors are 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_model_that_cannot_be_is_refused_in_one_line(wrong: str, tmp_path: Path) -> None:
    """By every way in: without its own weights, transformers would go on with random ones."""
    model, _ = build(image_size=32)
    model.save_pretrained(tmp_path)
    damage, message = WRONG[wrong]
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_processor_of(str(tmp_path)), load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    for load in (AutoModel.from_pretrained, lambda folder: load_weights(model, folder)) if "lacks" in message else ():
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_towers_and_stock_models_with_damaged_weights_are_refused(tmp_path: Path) -> None:
    name = write_stock(tmp_path / "clip", "clip")
    filled("text_model", math.nan)(tmp_path / "clip")
    for load in (load_model, lambda name: load_tower(name, "text")):
        with pytest.raises(ValueError, match=r"^The weight \S+ in .*clip/model.safetensors is not finite"):
            load(name)


# -- another text tower for a whole model -------------------------------------------------------------------------------
@pytest.fixture
def words(tmp_path: Path) -> str:
    """A random BERT, 40 channels wide, with its tokenizer; it pads with its end."""
    torch.manual_seed(1)
    tokenizer = chinese_tokenizer()
    shape = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    AutoModel.from_config(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "words")
    tokenizer.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


@pytest.mark.parametrize("cached", [False, True])
def test_layers_over_frames_are_trained_unless_the_tower_is_stored(cached: bool, tmp_path: Path) -> None:
    frozen = {"freeze_vision": True, "freeze_text": True, "cache_features": cached}
    args = ModelArguments(model_name_or_path=write_stock(tmp_path / "clip", "clip"), fusion_layers=0, **frozen)
    tower = build_model(args, NO_TOKENIZER, "clip").vision_model
    trained = {name.split(".")[0] for name, weight in tower.named_parameters() if weight.requires_grad}
    assert trained == (set() if cached else {"mix", "layers"})


def test_a_clip_reads_longer_captions_by_stretched_positions(tiny_flags: list[str], tmp_path: Path) -> None:
    """Texts of up to 20 tokens are embedded as before; saved, resumed and opened by the stock class."""
    name = write_stock(tmp_path / "clip", "clip")
    plain = build_model(ModelArguments(model_name_or_path=name), NO_TOKENIZER).eval()
    model = build_model(ModelArguments(model_name_or_path=name), NO_TOKENIZER).eval()
    fit_positions(model, 248)
    ids = torch.randint(3, 30, (2, 248))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        for length, equal in ((77, False), (20, True)):
            ids[:, length - 1] = model.config.text_config.eos_token_id
            found = model.encode_text(ids[:, :length], mask[:, :length])[0]
            right = plain.encode_text(ids[:, :length], mask[:, :length])[0]
            assert torch.allclose(found, right, atol=1e-6) == equal
        assert model.encode_text(ids, mask)[0].shape == (2, 24)
    table = model.get_submodule("text_model").state_dict()
    before = plain.get_submodule("text_model").state_dict()
    rows = table["embeddings.position_embedding.weight"]
    old = before["embeddings.position_embedding.weight"]
    torch.testing.assert_close((rows[20], rows[-1]), (old[20], old[-1]))
    flags = [
        *tiny_flags[:2],
        *tiny_flags[4:10],
        "--model_name_or_path",
        name,
        "--max_seq_length",
        "100",
        "--save_steps",
        "1",
    ]
    flags += ["--objectives", "contrastive", "--fusion_layers", "0", "--max_steps", "2"]
    pretrain.main([*flags, "--output_dir", str(tmp_path / "run")])
    stock = AutoModel.from_pretrained(tmp_path / "run/dual_encoder")
    assert stock.config.text_config.max_position_embeddings == 100
    resume = ["--resume_from_checkpoint", str(tmp_path / "run/checkpoint-1")]
    pretrain.main([*flags, *resume, "--output_dir", str(tmp_path / "again")])
    saved = [load_file(tmp_path / place / "model.safetensors") for place in ("run", "again")]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_siglip_2_reads_lower_case_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    """Its texts are those of the stock class and tokenizer, to 1e-6, also of what is saved and opened by other tools."""
    name = write_stock(tmp_path / "siglip2", "siglip2")
    texts = ["A Red Circle", "a red circle", "BLUE"]
    stock = AutoModel.from_pretrained(name).eval()
    tokens = Siglip2Tokenizer.from_pretrained(name)(texts, padding="max_length", max_length=64, return_tensors="pt")
    with torch.no_grad():
        right = F.normalize(stock.get_text_features(input_ids=tokens.input_ids).pooler_output, dim=-1)
    model, processor = open_model(name)
    torch.testing.assert_close(model.encode(texts=texts), right, rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path / "run")
    processor.save_pretrained(tmp_path / "run")
    saved = AutoModel.from_pretrained(tmp_path / "run", trust_remote_code=True)
    torch.testing.assert_close(saved.encode(texts=texts), right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_training_leaves_the_embeddings_of_images_bit_for_bit(
    kind: str, words: str, tiny_flags: list[str], tmp_path: Path
) -> None:
    start = write_stock(tmp_path / "start", kind)
    out = str(tmp_path / "out")
    towers = ["--model_name_or_path", start, "--text_model_name_or_path", words]
    rate = ["--learning_rate", "0.01", "--objectives", "contrastive,matching", "--max_steps", "2"]
    rate += ["--load_best_model_at_end", "false"]  # the start in closed form may be the best
    pretrain.main([*tiny_flags[:2], *tiny_flags[4:], *towers, *rate, "--output_dir", out])
    assert "text to image, by the closed form" in Path(out, "README.md").read_text()  # the new text tower's start
    before = load_model(start).eval()
    after = load_model(out).eval()
    own = load_processor_of(start)
    pixels = own(images=noise(), return_tensors="pt").pixel_values
    with torch.no_grad():
        found = after.encode_image(pixels, with_keys_values=False)[0]
        right = before.encode_image(pixels, with_keys_values=False)[0]
        assert torch.equal(found, right)
    learnt = AutoModel.from_pretrained(words).state_dict()["embeddings.word_embeddings.weight"]
    assert not torch.equal(after.text_model.state_dict()["embeddings.word_embeddings.weight"], learnt)


@pytest.mark.parametrize("medium", ["sound", "clip"])
def test_sounds_and_clips_get_another_text_tower_too(medium: str, words: str, tmp_path: Path) -> None:
    name = write_clap(tmp_path / medium) if medium == "sound" else write_stock(tmp_path / medium, "clip")
    model, _ = build(medium, model_name_or_path=name, text_model_name_or_path=words, fusion_layers=1)
    media = torch.randn((2, 1, 101, 16) if medium == "sound" else (2, 4, 3, 32, 32))
    model.save_pretrained(tmp_path / "run")
    alone = load_model(name, medium=medium).eval()
    trained = load_model(name, medium=medium).eval()
    use_channels_last(trained.vision_model)
    multiply_patches(trained.vision_model)  # as in training, where sums have another order than by convolutions
    with torch.no_grad():
        for each, right in ((model, trained), (load_model(str(tmp_path / "run")).eval(), alone)):
            assert torch.equal(each.encode_image(media)[0], right.encode_image(media)[0])
            assert each.encode_text(*2 * [torch.ones(1, 3, dtype=torch.long)])[0].shape == (1, 24)
    if medium == "sound":
        with pytest.raises(ValueError, match="CLAP's own text tower, and this model another"):
            to_dual_encoder(model)


# -- clips and sounds ---------------------------------------------------------------------------------------------------
def sound(seconds: float, rate: int = 16000) -> bytes:
    time = np.arange(int(seconds * rate)) / rate
    samples = 6000 * np.sin(2 * np.pi * (300 + 200 * time) * time) + 500 * np.random.default_rng(0).normal(
        size=len(time)
    )
    return write_wav(samples.astype(np.int16), rate)


def test_sound_tiny_encodes_as_evaluation_does_and_is_saved_whole(tmp_path: Path) -> None:
    model, processor = build("sound", 2.3, fusion_layers=1)
    extractor = processor.feature_extractor
    assert (extractor.max_length_s, extractor.window_seconds, extractor.sampling_rate) == (3, 3.0, 16000)
    for seconds, rate in ((1.2, 16000), (4.0, 16000), (3.0, 22050)):
        content = sound(seconds, rate)
        (tmp_path / "a.wav").write_bytes(content)
        timed = read_by(processor, 1.0)
        example = timed.read({"bytes": content, "path": None}, None)[0]
        expected = model.encode_image(timed.features(example[None]), with_keys_values=False)[0]
        torch.testing.assert_close(model.encode(sounds=str(tmp_path / "a.wav")), expected, atol=1e-3, rtol=0)
        given = [(np.frombuffer(content[44:], np.int16) / 32768, rate)]
        torch.testing.assert_close(model.encode(sounds=given), expected, atol=1e-3, rtol=0)
        assert sorted(place for place, _ in model.rerank("a dog", [*given, str(tmp_path / "a.wav")])) == [0, 1]
    model.save_pretrained(tmp_path)
    assert load_processor_of(str(tmp_path)).feature_extractor.window_seconds == 3.0  # type: ignore[attr-defined]
    for again in (
        FusionDualEncoderModel.from_pretrained(tmp_path),
        build("sound", 9.0, model_name_or_path=str(tmp_path))[0],
    ):
        torch.testing.assert_close(again.encode(sounds=given), model.encode(sounds=given))
    with pytest.raises(ValueError, match="it reads sounds, and the data are images"):
        build_model(ModelArguments(model_name_or_path=str(tmp_path)), processor.tokenizer)


EXTRACTORS = {
    "audio-spectrogram-transformer": (ASTFeatureExtractor(num_mel_bins=32, max_length=96), 0.96),
    "whisper": (WhisperFeatureExtractor(16, chunk_length=1), 1.0),
    "wav2vec2": (Wav2Vec2FeatureExtractor(), 0.9),
}


@pytest.mark.parametrize("kind", [*EXTRACTORS, "clap", "clap-fused"])
def test_sound_towers_have_their_own_extractor_and_are_taken_from_whole_models(kind: str, tmp_path: Path) -> None:
    extractor, window = EXTRACTORS.get(kind, (None, 1.0))
    if extractor is not None:
        AutoModel.from_config(AutoConfig.for_model(kind, **TOWERS[kind])).save_pretrained(tmp_path)
        extractor.save_pretrained(tmp_path)
    else:
        write_clap(tmp_path, fused=kind == "clap-fused")
        AutoProcessor.from_pretrained(tmp_path).feature_extractor.save_pretrained(tmp_path)
    model, processor = build("sound", 0.9, vision_model_name_or_path=str(tmp_path))
    assert processor.feature_extractor.window_seconds == pytest.approx(window)
    assert model.encode(sounds=[(np.random.default_rng(0).normal(size=9000) / 9, 16000)]).shape[0] == 1
    whole = AutoModel.from_pretrained(tmp_path)
    found = model.vision_model.state_dict()
    part = getattr(
        whole, {"whisper": "encoder", "clap": "audio_model", "clap-fused": "audio_model"}.get(kind, ""), whole
    )
    for name, value in part.state_dict().items():
        if name in found:
            torch.testing.assert_close(found[name], value)


def test_a_saved_tokenizer_cuts_where_training_did(tmp_path: Path) -> None:
    """Files of sentence-transformers have a max_length, which goes before model_max_length in processors of transformers."""
    tokenizer = train_tokenizer(["one two three"], 50)
    tokenizer.init_kwargs["max_length"] = 128
    cut_texts_at(tokenizer, 8)
    VisionTextDualEncoderProcessor(CLIPImageProcessor(), tokenizer).save_pretrained(tmp_path)
    found = VisionTextDualEncoderProcessor.from_pretrained(tmp_path)
    assert [len(ids) for ids in found(text=["one " * 300], padding=True, truncation=True)["input_ids"]] == [8]


def test_a_frame_that_is_shown_for_longer_is_read_once() -> None:
    model, _ = build("clip", image_size=32)
    tower = model.vision_model.eval()
    read: list[int] = []
    tower.backbone.register_forward_pre_hook(lambda _, args: read.append(len(args[0])))
    two, many = torch.randn(2, 16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    two = torch.cat([two[:1].expand(8, -1, -1, -1), two[1:2].expand(8, -1, -1, -1)])
    clips = torch.stack([two, many])
    for hidden in (False, True):
        with torch.enable_grad():
            every = tower(pixel_values=clips, output_hidden_states=hidden)
        with torch.no_grad():
            once = tower(pixel_values=clips, output_hidden_states=hidden)
        torch.testing.assert_close(once.pooler_output, every.pooler_output)
        for one, other in zip(once.get("hidden_states") or (), every.get("hidden_states") or (), strict=True):
            torch.testing.assert_close(one, other)
    assert read == [32, 18, 32, 18]


def test_clip_tiny_encodes_frames(tmp_path: Path) -> None:
    model, _ = build("clip", image_size=32)
    assert isinstance(model.vision_model, FramesTower)
    frames = [Image.new("RGB", (48, 32), (10 * at, 0, 255 - 10 * at)) for at in range(20)]
    (tmp_path / "a.gif").write_bytes(animation(20))
    assert model.encode(clips=[frames, str(tmp_path / "a.gif")]).shape == (2, model.config.projection_dim)
    torch.testing.assert_close(model.encode(clips=frames), model.encode(clips=[frames]))
    model.save_pretrained(tmp_path)
    again = load_processor_of(str(tmp_path)).image_processor  # type: ignore[attr-defined]
    assert again.clip_frames == 16
    with pytest.raises(ValueError, match="reads clips, and it was given images"):
        model.encode(images=frames[0])


@pytest.mark.parametrize(("kind", "own"), [("videomae", VideoMAEImageProcessor), ("vjepa2", VJEPA2VideoProcessor)])
def test_video_towers_have_their_own_colours(kind: str, own: Any, tmp_path: Path) -> None:
    vision_tower(AutoConfig.for_model(kind, **TOWERS[kind])).save_pretrained(tmp_path)
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    own(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], **size).save_pretrained(tmp_path)
    model, processor = build("clip", vision_model_name_or_path=str(tmp_path))
    images = processor.image_processor
    assert images.clip_frames == 8
    assert (tuple(images.image_mean), images.crop_size["height"]) == ((0.4, 0.5, 0.6), 16)
    assert model.encode(clips=[[Image.new("RGB", (20, 16))] * 9]).shape[0] == 1
