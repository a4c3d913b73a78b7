"""What every family of models keeps: saved, equal to its stock class, padding, gradient, frozen, another size."""

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoProcessor, BertConfig, BertModel

from mm_utils.checkpointing.state import write_model
from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.data.media.medium import image_geometry
from mm_utils.model.adapt import freeze_unused, switch_off_dropout
from mm_utils.model.arguments import ModelArguments, ObjectiveArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.encoding import encode_texts
from mm_utils.model.image_size import resize
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderModel,
    image_backbone,
    input_shape,
    vision_tower,
)
from mm_utils.model.processor import load_processor, load_processor_of
from mm_utils.model.stock import stock_processor, to_dual_encoder
from mm_utils.objectives.build import build_objective
from tests.kit.models import EMBEDS, LAYERS, TEXT, TOWERS, VISION, Batch, batch_for, build, outputs
from tests.kit.stock_folders import (
    KINDS,
    TEXTS,
    TOWER,
    close,
    noise,
    our_logits,
    siglip_tokenizer,
    stock_logits,
    write_clap,
    write_stock,
)

PAIRS = [
    *(f"{vision} bert" for vision in VISION),
    *(f"vit {text}" for text in TEXT if text != "bert"),
]
CLIPS = ("videomae", "timesformer", "vivit", "vjepa2", "vit")  # the other media towers read sounds
MEDIA = [f"{'clips' if kind in CLIPS else 'sounds'} {kind}" for kind in TOWERS]
WHOLE = [*KINDS, "clap", "clap-fused"]
FAMILIES = [*PAIRS, *MEDIA, *WHOLE]
NO_POOLER = "the stock class pools texts by a pooler, and this text tower has none"
REASONS = {  # why `VisionTextDualEncoderModel` cannot be written
    "resnet": "one pooled vector per image", "distilbert": NO_POOLER, "modernbert": NO_POOLER, "electra": NO_POOLER,
    "deberta": NO_POOLER, "clips": "reads images, and this model clips", "sounds": "reads images, and this model sounds",
}  # fmt: skip
NO_TOKENIZER = None
Made = Callable[[str], tuple[FusionDualEncoderModel, Batch]]


@pytest.fixture(scope="module")
def made(start: Callable[[str], str]) -> Made:
    """Return a small model of a family in evaluation mode, whose head counts, and a padded batch of four pairs."""

    def make(family):
        first, _, second = family.partition(" ")
        if family in PAIRS:
            model = build(first, second)
            return model, batch_for(model)
        torch.manual_seed(0)
        if family in MEDIA:
            tower = vision_tower(AutoConfig.for_model(second, **TOWERS[second]))
            if hasattr(tower.config, "apply_spec_augment"):
                tower.config.apply_spec_augment = False  # as `build_model` does
            model = join_backbones(tower, BertModel(BertConfig(**LAYERS, vocab_size=50)), medium=first[:-1])
            batch = batch_for(model)
        else:
            args = ModelArguments(model_name_or_path=start(family), gradient_checkpointing=True)
            processor = load_processor_of(start(family))
            model = build_model(args, processor.tokenizer, medium="sound" if "clap" in family else "image")
            batch = dict(processor.tokenizer(TEXTS, padding=True, return_tensors="pt"))
            batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
            if "clap" not in family:
                batch["pixel_values"] = processor(images=noise(4), return_tensors="pt").pixel_values
        if family not in KINDS:
            batch["pixel_values"] = torch.randn(4, *input_shape(model.vision_model))
        nn.init.xavier_uniform_(model.fusion.match.weight)  # type: ignore[union-attr]
        return model.eval(), batch

    return make


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a stock model of a kind, as its authors save it."""
    root = tmp_path_factory.mktemp("stock")

    def written(kind):
        folder = root / kind
        if not folder.is_dir():
            write_clap(folder, fused=kind == "clap-fused") if "clap" in kind else write_stock(folder, kind)
        return str(folder)

    return written


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_with_every_head_and_loaded_bit_for_bit(family: str, made: Made, tmp_path: Path) -> None:
    model, batch = made(family)
    model.add_token_head(captions=True)
    model.add_region_head()
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is FusionDualEncoderModel
    assert type(again.vision_model) is type(model.vision_model)
    assert not again.training
    assert [again.token_head, again.caption_adapter, again.region_head].count(None) == 0
    for tower in ("vision_model", "text_model"):
        attention = [getattr(each, tower).config._attn_implementation for each in (model, again)]
        assert attention[0] == attention[1]
    ours = model.state_dict()
    theirs = again.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name
    expected = outputs(model, batch)
    actual = outputs(again, batch)
    for name, value in expected.items():
        assert torch.isfinite(value).all(), name
        assert value.std(0).max() > 1e-6, f"{name} does not depend on its input; the test would be vacuous"
        # Convolution kernels may round by where in memory the loaded tensors lie.
        exact = family in PAIRS and (
            name == "text_embeds" or family.split()[0] not in ("convnext", "mobilenet", "resnet")
        )
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0 if exact else 1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_rows_and_their_padding_change_nothing(family: str, made: Made) -> None:
    model, batch = made(family)
    tolerance = 1e-4 if "mobilenet" in family else 1e-5  # its convolutions round by the number of rows
    together = outputs(model, batch)
    alone = []
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        own = {name: batch[name][row : row + 1, :length] for name in ("input_ids", "attention_mask")}
        alone.append(outputs(model, {**own, "pixel_values": batch["pixel_values"][row : row + 1]}))
    for name, value in together.items():
        torch.testing.assert_close(torch.cat([one[name] for one in alone]), value, rtol=1e-4, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", [*PAIRS, *MEDIA])
def test_the_stock_class_computes_the_same_or_there_is_a_reason(family: str, made: Made, tmp_path: Path) -> None:
    model, batch = made(family)
    if reason := next((REASONS[word] for word in family.split() if word in REASONS), None):
        with pytest.raises(ValueError, match=reason):
            to_dual_encoder(model)
        return
    to_dual_encoder(model).save_pretrained(tmp_path)
    stock = outputs(AutoModel.from_pretrained(tmp_path).eval(), batch, EMBEDS)
    for name, value in outputs(model, batch, EMBEDS).items():
        assert value.std(0).max() > 1e-3
        by_mean = name == "text_embeds" and model.config.text_pooling == "mean"  # as one more layer
        exact = not by_mean and (name == "text_embeds" or family.split()[0] not in ("convnext", "mobilenet"))
        torch.testing.assert_close(stock[name], value, rtol=0, atol=0 if exact else 1e-4, msg=name)


@pytest.mark.parametrize(
    ("objective", "family"),
    [*(("contrastive,matching,captioning", each) for each in FAMILIES), *(("sigmoid", each) for each in WHOLE)],
)
def test_every_trained_parameter_gets_a_gradient(objective: str, family: str, made: Made) -> None:
    model, batch = made(family)
    switch_off_dropout(model)
    freeze_unused(model)
    trained = build_objective(model, ObjectiveArguments(objective), 0)
    assert (model.logit_bias is not None) == (objective == "sigmoid")
    places = torch.arange(4)
    rows = {"ids": places[:, None].expand(4, 2), "image_keys": places, "caption_keys": places}
    statistics = {name: value.clone() for name, value in model.named_buffers() if "running" in name}
    model.config.freeze_batch_norm = True
    trained.train()({**batch, **rows, "lengths": batch["attention_mask"].sum(1).tolist()}, 1)["loss"].backward()
    lacking = [name for name, value in trained.named_parameters() if value.requires_grad and value.grad is None]
    assert not lacking
    assert all(torch.equal(dict(model.named_buffers())[name], value) for name, value in statistics.items())


@pytest.mark.parametrize(("frozen", "family"), zip(itertools.cycle(("vision", "text")), FAMILIES, strict=False))
def test_a_frozen_tower_rests(frozen: str, family: str, made: Made) -> None:
    model, batch = made(family)
    model.freeze(frozen)
    model.train()
    still = image_backbone(model.vision_model) if frozen == "vision" else model.text_model
    before = copy.deepcopy(still.state_dict())
    output = model(**batch, return_loss=True)
    (output.loss + F.binary_cross_entropy_with_logits(output.match_logits, torch.tensor([1.0, 0, 1, 0]))).backward()
    assert not any(module.training for module in still.modules())
    assert all(parameter.grad is None for parameter in still.parameters())
    torch.testing.assert_close(dict(still.state_dict()), dict(before), rtol=0, atol=0)


# -- whole models of transformers ---------------------------------------------------------------------------------------
def write_as_both(model: FusionDualEncoderModel, processor: Any, folder: Path) -> FusionDualEncoderModel:
    """Save a model in `run` and, read from there, as its stock class in `stock`; return what was read."""
    model.save_pretrained(folder / "run")
    processor.save_pretrained(folder / "run")
    again = load_model(str(folder / "run")).eval()
    stock = to_dual_encoder(again)
    stock.save_pretrained(folder / "stock")
    stock_processor(load_processor_of(str(folder / "run")), stock.config).save_pretrained(folder / "stock")
    return again


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_computes_what_its_class_does_and_is_written_as_that_class(
    kind: str, start: Callable[[str], str], tmp_path: Path
) -> None:
    """Alone, padded, in groups of a length as training embeds captions; trained, saved, and as a start again."""
    folder = start(kind)
    right = stock_logits(start(kind))
    processor = load_processor_of(folder)
    model = build_model(ModelArguments(model_name_or_path=folder, fusion_layers=1), processor.tokenizer).eval()
    assert model.logit_scale.item() == pytest.approx(2.0)
    assert (model.logit_bias is None) == ("siglip" not in kind)
    mean = [0.5] * 3 if "siglip" in kind else [0.48145466, 0.4578275, 0.40821073]
    assert image_geometry(processor)[:2] == (32, pytest.approx(mean))
    close(our_logits(model, folder), right)
    for place, text in enumerate(TEXTS):  # alone, without padding
        close(our_logits(model, folder, [text]), right[:, place : place + 1])
    texts = sorted(TEXTS * 5, key=len, reverse=True)
    captions = encode_captions(processor.tokenizer, texts, 64)
    ids, mask = pad_captions(captions, processor.tokenizer.pad_token_id)
    with torch.no_grad():
        image, _ = model.encode_image(processor(images=noise(), return_tensors="pt").pixel_values)
        text, _ = encode_texts(model, ids, mask, [len(caption) for caption in captions])
        logits = model.logit_scale.exp() * image @ text.T + (0 if model.logit_bias is None else model.logit_bias)
        close(logits, stock_logits(folder, texts))
        for parameter in model.parameters():  # as if trained
            parameter.mul_(1.01)
    trained = our_logits(model, folder)
    close(our_logits(write_as_both(model, processor, tmp_path), tmp_path / "run"), trained)
    paths = tmp_path / "stock", Path(folder)
    assert len({tuple(AutoConfig.from_pretrained(path).architectures) for path in paths}) == 1
    assert len({type(AutoProcessor.from_pretrained(path)) for path in paths}) == 1
    assert len({tuple(sorted(load_file(path / "model.safetensors"))) for path in paths}) == 1
    close(stock_logits(tmp_path / "stock"), trained)
    close(our_logits(load_model(str(tmp_path / "stock")), tmp_path / "stock"), trained)


RATE = 16000
SOUNDS = [  # noise of a third of CLAP's window, of most of it, and of all
    (3000 * np.random.default_rng(0).standard_normal(int(RATE * seconds))).astype(np.int16) / 32768
    for seconds in (0.3, 0.7, 1.0)
]


@torch.no_grad()
def stock_embeds(folder: str) -> tuple[Tensor, Tensor]:
    """The unit embeddings of sounds and texts by the stock class, with the folder's own processor."""
    stock = AutoModel.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    words = processor.tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    heard = [processor.feature_extractor(each, sampling_rate=RATE, return_tensors="pt") for each in SOUNDS]
    features = torch.cat([each["input_features"] for each in heard])
    found = stock.get_audio_features(features, is_longer=torch.zeros(len(features), 1, dtype=torch.bool))
    texts = stock.get_text_features(words.input_ids, words.attention_mask)
    return F.normalize(found.pooler_output, dim=-1), F.normalize(texts.pooler_output, dim=-1)


@pytest.mark.parametrize("kind", ["clap", "clap-fused"])
def test_a_clap_computes_what_its_class_does_and_is_written_as_that_class(
    kind: str, start: Callable[[str], str], tmp_path: Path
) -> None:
    folder = start(kind)
    given = {"sounds": [(each, RATE) for each in SOUNDS], "texts": TEXTS}
    processor = load_processor_of(folder)
    model = build_model(ModelArguments(model_name_or_path=folder), processor.tokenizer, medium="sound").eval()
    model.processor = processor
    right = stock_embeds(folder)
    assert model.logit_scale.item() == pytest.approx(2.5)  # the mean of two
    assert min(each.std(0).mean() for each in right) > 0.01
    torch.testing.assert_close(model.encode(**given), right, rtol=0, atol=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    write_model(tmp_path, model, processor)
    trained = AutoModel.from_pretrained(tmp_path, trust_remote_code=True).encode(**given)
    assert not torch.allclose(trained[0], right[0], atol=1e-4)
    torch.testing.assert_close(load_model(str(tmp_path)).encode(**given), trained)
    stock = tmp_path / "dual_encoder"
    assert stock.is_dir() == (kind == "clap")  # a fused extractor does more
    if kind == "clap":
        torch.testing.assert_close(stock_embeds(str(stock)), trained, rtol=0, atol=1e-5)
        own = AutoModel.from_pretrained(stock)
        assert own.logit_scale_a.item() == own.logit_scale_t.item() == model.logit_scale.item()


@pytest.mark.parametrize("side", ["left", "right"])
def test_siglip_reads_padding_on_the_side_of_its_tokenizer(
    side: str, start: Callable[[str], str], tmp_path: Path
) -> None:
    AutoModel.from_pretrained(start("siglip")).save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(start("siglip")).save_pretrained(tmp_path)
    siglip_tokenizer(side).save_pretrained(tmp_path)
    close(our_logits(load_model(str(tmp_path)), tmp_path), stock_logits(tmp_path))
    assert torch.allclose(stock_logits(start("siglip")), stock_logits(tmp_path)) == (side == "right")


def test_sigmoid_keeps_a_trained_bias_and_temperature(start: Callable[[str], str]) -> None:
    model = build_model(ModelArguments(model_name_or_path=start("siglip")), NO_TOKENIZER)
    build_objective(model, ObjectiveArguments("sigmoid"), 0)
    assert (model.logit_scale.item(), model.logit_bias.item()) == (pytest.approx(2.0), -3.5)  # type: ignore[union-attr]
    model.logit_scale.data.fill_(4.77)  # that of published checkpoints, above the usual bound
    assert build_objective(model, ObjectiveArguments("contrastive"), 0).highest_scale == pytest.approx(math.exp(4.77))
    stock = to_dual_encoder(model)
    assert stock.logit_bias.item() == 0


# -- another size -------------------------------------------------------------------------------------------------------
SIZE = 56
SIZED = {
    **{
        kind: {**TOWER, "patch_size": 8}
        for kind in ("vit", "deit", "dinov2", "ijepa", "siglip_vision_model", "dinov3_vit")
    },
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
}


@pytest.mark.parametrize("kind", SIZED)
def test_a_tower_reads_another_size_as_its_own_class_interpolates(kind: str) -> None:
    torch.manual_seed(0)
    tower = AutoModel.from_config(AutoConfig.for_model(kind, **SIZED[kind], image_size=32)).eval()
    pixels = torch.randn(2, 3, SIZE, SIZE)
    own = {"interpolate_pos_encoding": True} if kind in ("vit", "deit", "ijepa", "siglip_vision_model") else {}
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        made = resize(tower, SIZE)
        right = tower(pixels, **own)["last_hidden_state"]
        torch.testing.assert_close(made(pixels)["last_hidden_state"], right, rtol=0, atol=1e-5)
    assert getattr(made.config, "image_size", SIZE) == SIZE
    assert not made.training


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_at_another_size_opens_with_stock_tools(
    kind: str, start: Callable[[str], str], tmp_path: Path
) -> None:
    """Against the stock class at that size, which interpolates in every forward."""
    args = ModelArguments(model_name_or_path=start(kind), image_size=SIZE, fusion_layers=1)
    processor = load_processor(args, [])
    model = build_model(args, processor.tokenizer).eval()
    before = AutoModel.from_pretrained(start(kind)).eval()
    shown = [Image.fromarray(each) for each in np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)]
    given = {**processor(images=shown, return_tensors="pt"), "interpolate_pos_encoding": True}
    inputs = processor(text=TEXTS, images=shown, padding=True, return_tensors="pt")
    with torch.no_grad():
        right = F.normalize(before.get_image_features(**given).pooler_output, dim=-1)
        torch.testing.assert_close(model.encode_image(inputs["pixel_values"])[0], right, rtol=0, atol=1e-5)
        write_as_both(model, processor, tmp_path)
        assert image_geometry(load_processor_of(str(tmp_path / "run")))[0] == SIZE
        stock = AutoModel.from_pretrained(tmp_path / "stock")
        whole = AutoProcessor.from_pretrained(tmp_path / "stock")
        padding = {"padding": "max_length", "max_length": 64} if "siglip" in kind else {"padding": True}
        words = whole.tokenizer(TEXTS, return_tensors="pt", **padding)
        theirs = stock.eval()(**words, **whole.image_processor(shown, return_tensors="pt")).logits_per_image
        close(theirs, model(**inputs).logits_per_image)
