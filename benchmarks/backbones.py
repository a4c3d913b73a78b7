"""Build tiny vision and text backbones of transformers, and check what becomes of them.

    python -m benchmarks.backbones
    python -m benchmarks.backbones --families vit,beit,bert --output_file backbones.md

Weights are random, so no family is downloaded. `right` means: the pooled output is the stock model's own, equal in a second run and
in training mode, and equal alone and in a batch, of other images or of longer texts. `refused` is a backbone that the project
does not accept, with the reason in its own words; `WRONG` one that it accepts and should not. `not tried` are families whose
tiny size needs settings of its own. The image processor is that of the family, in its default settings.
"""

import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from mm_utils.arguments import arg, parse_args
from mm_utils.distributed import RunError
from mm_utils.extras.export.graphs import tower_graphs, trace
from mm_utils.extras.families.image_size import resize
from mm_utils.extras.families.text_tower import with_text_tower
from mm_utils.model.adapt import switch_off_dropout
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import _center_square_processor
from mm_utils.text import markdown_table, markdown_text, one_line

MOST_PARAMETERS = 20_000_000
TOLERANCE = 2e-4
OPSET = 18
SIDES = (32, 64, 224)  # of images, tried in turn
# Fields of configurations that make a model small; a list keeps its length.
NUMBERS = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "width", "emb_dim", "input_dim", "embedding_size"), 32
    ),
    **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    "vocab_size": 128,
    **{
        "patch_size": 8,
        "embed_dim": 16,
        "depth_multiplier": 0.25,
        "width_coefficient": 0.25,
        "depth_coefficient": 0.5,
    },
    **{"d_kv": 16, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 128, "d_embed": 32, "d_head": 16},
    **{"hidden_dim": 64, "num_experts": 2, "num_local_experts": 2, "moe_intermediate_size": 32},
}
FAMILIES = [
    "aimv2_vision_model", "albert", "bart", "beit", "bert", "big_bird", "bit", "bloom", "camembert",
    "clip_text_model", "clip_vision_model", "convbert", "convnext", "convnextv2", "ctrl", "cvt", "data2vec-vision",
    "deberta", "deberta-v2", "deit", "dinat", "dinov2", "dinov2_with_registers", "dinov3_convnext", "dinov3_vit",
    "distilbert", "donut-swin", "efficientnet", "electra", "ernie", "eurobert", "falcon", "flaubert", "fnet",
    "focalnet", "funnel", "gemma2", "glpn", "gpt2", "gpt_neo", "gpt_neox", "hgnet_v2", "hiera", "ijepa",
    "jina_embeddings_v3", "levit", "llama", "longformer", "mbart", "mistral", "mobilebert", "mobilenet_v1",
    "mobilenet_v2", "mobilevit", "mobilevitv2", "modernbert", "mpnet", "nomic_bert", "nystromformer", "opt", "phi",
    "pixtral", "poolformer", "pp_hgnet", "pvt", "pvt_v2", "qwen2", "qwen3", "regnet", "rembert", "resnet",
    "roberta", "roformer", "sam_vision_model", "segformer", "siglip2_vision_model", "siglip_vision_model",
    "squeezebert", "swiftformer", "swin", "swinv2", "t5", "textnet", "timesformer", "videomae", "vit", "vit_mae",
    "vit_msn", "vitdet", "xlm", "xlm-roberta", "xlnet", "yolos",
]  # fmt: skip
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
ENDS = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # of text, of images, of both
    "clip": (ENDS, {}, {}),
    "metaclip_2": (ENDS, {}, {}),
    "altclip": ({"project_dim": 24}, {}, {}),
    "aimv2": (ENDS, {}, {}),
    "chinese_clip": ({}, {}, {}),
    "clipseg": (ENDS, {}, {}),
    "blip": ({"encoder_hidden_size": 32, "is_decoder": False}, {}, {"image_text_hidden_size": 24}),
    "tipsv2": ({}, {}, {}),
    "align": ({}, {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25}, {}),
    "owlvit": ({}, {}, {}),
    "owlv2": ({}, {}, {}),
    "groupvit": ({}, {}, {}),
    "flava": ({}, {}, {}),
}
"""Whole models, besides SigLIP's, which read padding; those that fit are found by their parts, not by this list."""
TESTED = [  # further rows of that table, whose cells are those of tests
    ["siglip, siglip2", "right", "yes", "yes", "its own", "yes", "families/test_stock, test_image_size, test_text_tower; export/test_folder"],
    ["vision-text-dual-encoder", "right", "yes", "yes", "its own", "yes", "an own run is one: families/test_stock_doors; export/test_folder"],
    ["clap", "right, with one temperature", "sounds have none", "yes", "its own", "not tried", "families/test_stock_media, test_text_tower"],
    ["xclip", "right, without its prompts", "yes", "yes", "none: the stock class makes a text depend on the clip", "not tried", "the same"],
    ["open_clip, its own two towers", "right, equal to open_clip 3.3", "as clip", "as clip", "clip", "yes, and as `--layout open_clip`", "families/test_open_clip"],
    ["open_clip, towers of timm (`timm_model_name`)", "refused by name: each of its families has weights of other names", "", "", "", "", "the same"],
    ["open_clip, text towers of transformers (`hf_model_name`)", "refused by name: mostly with a projection of two layers, which no stock class has", "", "", "", "", "the same"],
    ["blip_2, clvp, pe_video, sam3, videoprism", "not tried", "", "", "", "", ""],
]  # fmt: skip
LISTS: dict[str, Callable[[int], list[int]]] = {
    "depths": lambda count: [1] * count,
    "hidden_sizes": lambda count: [16 * 2**place for place in range(count)],
}


@dataclass
class SurveyArguments:
    """The families to survey, and where to write the table."""

    families: str | None = arg(None, "Model types with a comma between; default: some hundred, see FAMILIES.")
    output_file: str | None = arg(None, "Also write the table to this Markdown file.")


def tiny_configs(kind: str, side: int) -> list[PreTrainedConfig]:
    """Return configurations of a family, smallest first; some need more of their defaults."""
    default = AutoConfig.for_model(kind)
    numbers: dict[str, Any] = {**NUMBERS, "image_size": side}
    small: dict[str, Any] = {
        name: value
        for name, value in numbers.items()
        if isinstance(getattr(default, name, None), (int, float)) and not isinstance(getattr(default, name), bool)
    }
    if isinstance(getattr(default, "image_size", None), (list, tuple)):
        small["image_size"] = [side, side]
    lists: dict[str, Any] = {
        name: make(len(getattr(default, name)))
        for name, make in LISTS.items()
        if isinstance(getattr(default, name, None), (list, tuple)) and not isinstance(getattr(default, name)[0], list)
    }
    few: dict[str, Any] = {name: small[name] for name in ("image_size", "vocab_size") if name in small}
    tries: list[dict[str, Any]] = [{**small, **lists}, small, {**few, **lists}, few]
    found = []
    for fields in tries:
        with suppress(Exception):  # of any kind: each family checks its fields in its own way
            found.append(AutoConfig.for_model(kind, **fields))
    return found


def build(kind: str, tower: str) -> PreTrainedModel:
    """Build a tiny backbone that runs on one image or two tokens, or raise the first error."""
    errors: list[Exception] = []
    for side in SIDES if tower == "vision" else SIDES[:1]:
        for config in tiny_configs(kind, side):
            try:
                with torch.device("meta"):
                    size = sum(weight.numel() for weight in AutoModel.from_config(config).parameters())
                if size > MOST_PARAMETERS:
                    raise ValueError(f"{size:,} parameters")
                torch.manual_seed(0)
                model = AutoModel.from_config(config).eval()
                stir(model)
                with torch.no_grad():
                    model(**inputs_of(model, tower, 1), return_dict=True)
            except Exception as error:  # of any kind: 400 families, each with its own
                errors.append(error)
            else:
                return model
    raise errors[0]


def stir(model: nn.Module) -> None:
    """Make all weights count: many layers start at zero, where a mistake would not show."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data.add_(0.05 * torch.randn(weight.shape, generator=generator))


def inputs_of(model: PreTrainedModel, tower: str, rows: int) -> dict[str, Tensor]:
    """Return different images, or texts of 7 tokens and fewer."""
    generator = torch.Generator().manual_seed(2)
    if tower == "vision":
        side = getattr(model.config, "image_size", None) or 64
        side = side[0] if isinstance(side, (list, tuple)) else side
        return {"pixel_values": torch.randn(rows, 3, side, side, generator=generator)}
    lengths = torch.tensor([7, 4, 2, 5])[-rows:]
    mask = (torch.arange(7) < lengths[:, None]).long()
    ids = torch.randint(5, 100, (rows, 7), generator=generator) * mask
    longest = int(lengths.max())
    return {"input_ids": ids[:, :longest], "attention_mask": mask[:, :longest]}


def check(kind: str, tower: str, other: PreTrainedModel) -> tuple[str, str]:
    """Return the verdict on a family and its reason."""
    try:
        backbone = build(kind, tower)
    except Exception as error:
        return "not tried", one_line(error)[:90]
    towers = (backbone, other) if tower == "vision" else (other, backbone)
    try:
        model = FusionDualEncoderModel.from_backbones(*towers, fusion_layers=1).eval()
        switch_off_dropout(model)
        return verdict(model, backbone, tower)
    except ValueError as error:
        return "refused", " ".join(str(error).split())[:160]
    except Exception as error:
        return "refused", f"{type(error).__name__}: {one_line(error)[:140]}"


@torch.no_grad()
def verdict(model: FusionDualEncoderModel, backbone: PreTrainedModel, tower: str) -> tuple[str, str]:
    """Compare pooled outputs with the stock backbone's: twice, in training mode, and alone."""
    inputs = inputs_of(backbone, tower, 4)

    def pooled(given: dict[str, Tensor]) -> Tensor:
        run: Any = model.vision_features if tower == "vision" else model.text_features
        return run(*given.values())[0]

    pooling = getattr(model.config, f"{tower}_pooling")
    whole, again = pooled(inputs), pooled(inputs)
    differences = {
        "the stock output": stock(backbone, inputs, pooling),
        "a second run": again,
        "one row alone": torch.cat([pooled(alone(inputs, row)) for row in range(4)]),
    }
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    differences["training mode"] = pooled(inputs)
    scale = whole.abs().max().clamp(min=1e-6)
    wrong = [
        name for name, value in differences.items() if not ((value - whole).abs().max() / scale < TOLERANCE).item()
    ]
    return ("WRONG", f"{pooling}; other than {', '.join(wrong)}") if wrong else ("right", pooling)


def stock(backbone: PreTrainedModel, inputs: dict[str, Tensor], pooling: str) -> Tensor:
    """Return the pooled output of a backbone by itself."""
    output = backbone(**inputs, return_dict=True)
    if pooling == "pooler":
        return output["pooler_output"].flatten(1)
    hidden = output["last_hidden_state"]
    if hidden.dim() == 4:
        return hidden.flatten(2).mean(2)
    rows = [row if mask is None else row[mask] for row, mask in zip(hidden, _masks(inputs, len(hidden)), strict=True)]
    return torch.stack([row.mean(0) for row in rows])


def _masks(inputs: dict[str, Tensor], rows: int) -> list[Tensor | None]:
    return [None] * rows if "attention_mask" not in inputs else list(inputs["attention_mask"].bool())


def alone(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """Return one row, without padding."""
    length = int(inputs["attention_mask"][row].sum()) if "attention_mask" in inputs else None
    return {
        name: value[row : row + 1] if length is None else value[row : row + 1, :length]
        for name, value in inputs.items()
    }


def processor_of(kind: str) -> str:
    """Return what the project makes of a family's image processor in its default settings."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind)
    name = names.get("torchvision") or names.get("pil") if isinstance(names, dict) else names and names[-1]
    if not name:
        return "none"
    try:
        own = getattr(transformers, name)()
    except Exception as error:
        return f"not tried: {one_line(error)[:60]}"
    try:
        ours = _center_square_processor(own, what="")
    except ValueError as error:
        return f"refused: {str(error).removeprefix('; its ').partition(', and here')[0][:100]}"
    mean, std = (f"{values[0]:.3g}" for values in (ours.image_mean, ours.image_std))
    return f"{ours.crop_size['height']} px, mean {mean}, std {std}"


def tower_of(config_class: type[PreTrainedConfig]) -> str | None:
    """Return the tower that a family could be, by its main input."""
    if config_class not in MODEL_MAPPING:
        return None
    classes = MODEL_MAPPING[config_class]
    model_class = classes[0] if isinstance(classes, (list, tuple)) else classes
    if getattr(config_class, "sub_configs", None):  # several models in one, images and texts together
        return None
    return {"pixel_values": "vision", "input_ids": "text"}.get(getattr(model_class, "main_input_name", ""))


def survey(families: list[str]) -> list[dict[str, str]]:
    """Return a row for each family."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    others = {
        "vision": AutoModel.from_config(AutoConfig.for_model("bert", **small, vocab_size=128)),
        "text": AutoModel.from_config(AutoConfig.for_model("vit", **small, image_size=32, patch_size=8)),
    }
    found: list[dict[str, str]] = []
    for kind in families:
        tower = tower_of(CONFIG_MAPPING[kind]) if kind in CONFIG_MAPPING else None
        if tower is None:
            continue
        result, reason = check(kind, tower, others[tower])
        processor = processor_of(kind) if tower == "vision" else ""
        found.append(
            {"tower": tower, "family": kind, "result": result, "why": markdown_text(reason), "processor": processor}
        )
    return sorted(found, key=lambda row: (row["tower"] != "vision", row["result"], row["family"]))


def build_whole(kind: str) -> Any:
    """Build a tiny whole model of random weights."""
    text, image, both = WHOLE[kind]
    second = "image_config" if kind == "flava" else "vision_config"
    fields = {"text_config": {**TEXT, **text}, second: {**IMAGE, **image}, "projection_dim": 24, **both}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **fields)).eval()
    stir(model)
    return model


def survey_whole(kinds: list[str]) -> list[list[str]]:
    """Return a row for each whole model: start, another size, another text tower, its class again, ONNX."""
    return [[kind, *check_whole(kind)] for kind in kinds]


@torch.no_grad()
def check_whole(kind: str) -> list[str]:
    """Return the cells of one whole model."""
    stock = build_whole(kind)
    with tempfile.TemporaryDirectory() as folder:
        stock.save_pretrained(folder)
        try:
            model: Any = load_model(folder, fusion_layers=0).eval()
        except ValueError as error:
            reason = (
                str(error).removeprefix(folder).removeprefix(f" holds a {kind}, which cannot be taken as a whole; ")
            )
            return ["refused: " + reason.partition(". Choose")[0][:120], "", "", "", ""]
    inputs = {**inputs_of(model.vision_model, "vision", 4), **inputs_of(model.text_model, "text", 4)}
    inputs["input_ids"][inputs["attention_mask"].cumsum(1) == inputs["attention_mask"].sum(1, keepdim=True)] = (
        2  # the end
    )
    inputs["input_ids"] *= inputs["attention_mask"]
    right = stock(**inputs).logits_per_image
    cells = ["right" if _alike(model(**inputs).logits_per_image, right) else "WRONG"]
    try:
        other = model.to_dual_encoder().eval()
        again = "its own" if type(other) is type(stock) else type(other).__name__
        cells = [*cells, again if _alike(other(**inputs).logits_per_image, right) else "WRONG"]
    except ValueError as error:
        cells.append(f"none: {error}"[:80])
    text = AutoModel.from_config(AutoConfig.for_model("bert", **TEXT))
    joined = with_text_tower(model, text, "auto", fusion_layers=0).eval()
    same = torch.equal(*(each.encode_image(inputs["pixel_values"])[0] for each in (joined, model)))
    try:
        larger = resize(model.vision_model, 48)
        larger(torch.zeros(1, 3, 48, 48))
        size = "yes"
    except ValueError as error:
        size = "refused: " + str(error)[:60]
    return [cells[0], size, "yes" if same else "WRONG", cells[1], exported(model, inputs)]


def exported(model: Any, inputs: dict[str, Tensor]) -> str:
    """Return whether the towers' ONNX graphs embed as the model does."""
    import onnxruntime

    right = (
        model.encode_image(inputs["pixel_values"])[0],
        model.encode_text(inputs["input_ids"], inputs["attention_mask"])[0],
    )
    with tempfile.TemporaryDirectory() as folder:
        for (name, graph), expected in zip(tower_graphs(model).items(), right, strict=True):
            path = Path(folder, f"{name}.onnx")
            try:
                trace(graph, path, OPSET)
            except RunError as error:
                return "refused: " + one_line(error)[:60]
            session = onnxruntime.InferenceSession(path)
            given = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
            if not _alike(torch.from_numpy(session.run(None, given)[0]), expected):
                return "WRONG"
    return "yes"


def _alike(found: Tensor, right: Tensor) -> bool:
    return bool((found - right).abs().max() < 1e-4 * right.abs().max())


def report(found: list[dict[str, str]], whole: list[list[str]]) -> str:
    """Return the tables in Markdown."""
    parts = [
        "# Backbones that were tried",
        f"Written by `python -m benchmarks.backbones --output_file docs/backbones.md`, which says what the words mean; transformers "
        f"{transformers.__version__}, tiny random weights. A family that is not here is tried like these when a run starts.",
    ]
    for tower in ("vision", "text"):
        rows = [row for row in found if row["tower"] == tower]
        counts = {
            result: sum(row["result"] == result for row in rows) for result in sorted({row["result"] for row in rows})
        }
        header = ["family", "result", "pooling, or reason", *(["image processor"] if tower == "vision" else [])]
        cells = [[row["family"], row["result"], row["why"], row["processor"]][: len(header)] for row in rows]
        parts += [
            f"## {tower.capitalize()}",
            f"{len(rows)} families: " + ", ".join(f"{count} {result}" for result, count in counts.items()),
        ]
        parts += [markdown_table(header, cells)]
    if whole:
        header = [
            *("family", "start: logits equal to its class", "`--image_size`", "other text tower, images equal"),
            *("`dual_encoder/`", "ONNX", "by"),
        ]
        parts += [
            "## Whole models",
            "What `--model_name_or_path` takes: two towers that are models by themselves, projections of one matrix each or none, and a "
            f"temperature. Tried here with tiny random weights (transformers {transformers.__version__}); the last rows are those of tests, "
            "which lie in `tests/extras`.",
            markdown_table(header, [*([*row, "this survey"] for row in whole), *TESTED]),
        ]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Print the survey; write it where the arguments say."""
    args = parse_args(SurveyArguments, doc=__doc__, argv=argv)[SurveyArguments]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster, for models this small
    logging.disable(logging.WARNING)
    try:
        families = args.families.split(",") if args.families else [*FAMILIES, *WHOLE]
        text = report(survey(families), survey_whole([kind for kind in families if kind in WHOLE]))
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    sys.stdout.write(text)
    if args.output_file:
        Path(args.output_file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
