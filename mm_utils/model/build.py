"""Build, load or convert a model; the flags that say how."""

import logging
import shlex
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.clap.modeling_clap import ClapProjectionLayer

from mm_utils.model.adapt import (
    add_adapters,
    freeze_unused,
    multiply_patches,
    switch_off_dropout,
    use_channels_last,
)
from mm_utils.model.arguments import TEXT_PRESETS, ModelArguments, TowerArguments, check_reads, preset, vision_preset
from mm_utils.model.encoding import use_known_padding
from mm_utils.model.image_size import resize
from mm_utils.model.join import join_backbones, probe
from mm_utils.model.modeling_fusion_dual_encoder import (
    DUAL_ENCODERS,
    FusionDualEncoderConfig,
    FusionDualEncoderModel,
    input_name,
    input_shape,
    text_positions,
    vision_tower,
)
from mm_utils.model.packing import use_packed_attention
from mm_utils.model.pretrained import check_words, explained, load_config, load_tower, load_weights
from mm_utils.model.processor import load_processor_of
from mm_utils.model.stock import load_stock
from mm_utils.places import missing

logger = logging.getLogger(__name__)
_KEPT_POSITIONS = 20  # of a text tower whose positions are stretched


def build_model(
    args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    medium: str = "image",
) -> FusionDualEncoderModel:
    """Build or load the arguments' model, in float32, with adapters, ready to be trained.

    Raises:
        ValueError: if its vision tower cannot read the medium, `image`, `clip` or `sound`.
    """
    model = _whole_model(args, medium)
    if model is None or args.joins_whole:
        model = _joined(args, tokenizer, medium, model)
    if args.new_tokens:
        _add_rows(model, tokenizer)
    if tokenizer is not None:
        words: Any = model.text_model.get_input_embeddings()
        check_words("The text encoder reads other words", tokenizer, words.num_embeddings)
    if args.lora_rank:
        for tower in () if args.model_name_or_path else ("vision", "text"):
            if not getattr(args, f"{tower}_model_name_or_path") and not getattr(args, f"freeze_{tower}"):
                raise ValueError(
                    f"--lora_rank is {args.lora_rank}; the {tower} backbone starts from scratch, and adapters need "
                    f"trained weights. Give --{tower}_model_name_or_path."
                )
    make_trainable(model, args)
    return model


@torch.no_grad()
def _add_rows(model: FusionDualEncoderModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the text embedding a row for each token that was added, the mean of the others."""
    tower: Any = model.text_model
    before = tower.get_input_embeddings().weight.detach().clone()
    if tower.config.model_type.startswith("clip") and tower.config.eos_token_id == 2:
        raise ValueError(
            "--add_tokens is given; this CLIP takes a text's token of the highest number for its end, which a new one would be. Set "
            f"eos_token_id of the text_config in its config.json to {tokenizer.eos_token_id}."
        )
    if len(tokenizer) > len(before):
        tower.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        tower.get_input_embeddings().weight[len(before) :] = before.mean(0)
        model.config.text_config = tower.config


def make_trainable(model: Any, args: TowerArguments) -> None:
    """Freeze what flags and outputs leave out, add adapters, and let the towers compute as is fastest."""
    for tower in model.towers:
        if getattr(args, f"freeze_{tower}"):
            model.freeze(tower)
    switch_off_dropout(model)
    if args.freeze_vision and args.cache_features:
        model.vision_model.requires_grad_(False)  # layers over frames too, since what is stored is the tower's output
    if args.lora_rank:
        add_adapters(model, args.lora_rank)
    freeze_unused(model)
    use_channels_last(model.vision_model)
    multiply_patches(model.vision_model)
    use_known_padding()
    use_packed_attention()
    if args.gradient_checkpointing:
        # transformers 6 has the first name only, early releases of 5 the second only
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _whole_model(args: ModelArguments, medium: str) -> FusionDualEncoderModel | None:
    """Load the model of `--model_name_or_path`, at `--image_size` if that is asked for; None without one."""
    name: Any = args.model_name_or_path
    if not name:
        return None
    head: dict[str, Any] = {
        "fusion_layers": 0 if args.joins_whole else args.fusion_layers,
        "frame_layers": args.frame_layers,
    }
    model = load_model(name, medium=medium, **head).float()
    if not args.joins_whole and args.fusion_layers not in (ModelArguments.fusion_layers, model.config.fusion_layers):
        raise ValueError(
            f"--fusion_layers is {args.fusion_layers}; the head of {name} has {model.config.fusion_layers} and stays as it is. "
            "Drop the flag."
        )
    reads = media_of(model.vision_model) if model.config.medium == medium else (model.config.medium,)
    check_reads(name, reads, medium)
    if args.image_size:
        model.vision_model = resize(model.vision_model, args.image_size)
        model.config.vision_config = model.vision_model.config
    return model


def _model_of_text(args: ModelArguments) -> FusionDualEncoderModel | None:
    """Load the model whose text encoder `--text_model_name_or_path` names, if it is one of ours; None for a backbone."""
    name = args.text_model_name_or_path
    title = f"--text_model_name_or_path is {name}"
    if not name or load_config(title, name).model_type != FusionDualEncoderConfig.model_type:
        return None
    model = load_model(name).float()
    if isinstance(model.text_projection, ClapProjectionLayer):
        raise ValueError(f"{title}; its projection is CLAP's own. Choose a model with a linear one.")
    own: Any = model.config
    for flag in ("projection", "projection_dim"):
        if getattr(args, flag) not in (None, getattr(own, flag)):
            raise ValueError(
                f"{title}, and --{flag} is {getattr(args, flag)}; that model has {getattr(own, flag)}. Give the same."
            )
    return model


def _joined(
    args: ModelArguments, tokenizer: PreTrainedTokenizerBase, medium: str, of_images: FusionDualEncoderModel | None
) -> FusionDualEncoderModel:
    """Join a vision and a text tower: each a backbone, or that of a whole model, which brings its projection.

    The image side of a whole model is frozen and stays bit for bit, so indexes stay valid. The result is then a
    `VisionTextDualEncoderModel`, or for CLAP's sounds a model of this project alone.
    """
    of_texts = None if of_images is not None else _model_of_text(args)
    # Batch norms that were trained elsewhere keep their statistics: a rank's batch is not the global batch.
    config: dict[str, Any] = {"medium": medium, "freeze_batch_norm": bool(args.vision_model_name_or_path)}
    names = ("projection", "projection_dim", "fusion_layers", "frame_layers")
    config |= {name: getattr(args, name) for name in names}
    if of_images is None:
        vision_model, config["vision_pooling"] = _backbone(args, "vision", tokenizer, medium)
    else:
        vision_model = of_images.vision_model
        own = of_images.config
        config |= {name: getattr(own, name) for name in ("vision_pooling", "projection_dim", "freeze_batch_norm")}
        if isinstance(of_images.visual_projection, ClapProjectionLayer):
            config["dual_encoder_type"] = "clap"
    if of_texts is None:
        text_model, config["text_pooling"] = _backbone(args, "text", tokenizer)
    else:
        text_model = of_texts.text_model
        own = of_texts.config
        config |= {name: getattr(own, name) for name in ("text_pooling", "projection_dim", "text_padding")}
    model = join_backbones(vision_model, text_model, **config)
    for side, whole in (("visual", of_images), ("text", of_texts)):
        projection: Any = getattr(whole, f"{side}_projection", None)
        if isinstance(projection, nn.Identity):  # SigLIP's; a product with ones is exact
            nn.init.eye_(getattr(model, f"{side}_projection").weight)
        elif projection is not None:
            setattr(model, f"{side}_projection", projection)
    if of_texts is not None:
        model.text_projection.requires_grad_(not args.freeze_text)
    if of_images is not None:
        for part in (model.vision_model, model.visual_projection):
            part.requires_grad_(False)
        logger.info(
            "The image side of the model stays as it is (%s, %d numbers an embedding); its texts are read by a new %s",
            own.vision_config.model_type,
            own.projection_dim,
            text_model.config.model_type,
        )
    return model


def load_model(
    name: str, *, kind: type[FusionDualEncoderModel] = FusionDualEncoderModel, needs_texts: bool = True, **head: Any
) -> Any:
    """Load a model: a run's folder, a checkpoint, a stock model of `DUAL_ENCODERS`, a Hub id.

    Args:
        kind: the class to load a model of ours with.
        needs_texts: whether a classifier of media alone, which has no text encoder, is refused.
        head: fields of `FusionDualEncoderConfig` for the new fusion head of a stock model; others have theirs.

    Raises:
        ValueError: if there is no model, it needs Python code of its own, or its weights are damaged.
    """
    title = f"{name} holds no model"
    config = _config_of_whole(title, name)
    if config.model_type in DUAL_ENCODERS:
        return load_stock(name, config, **head)
    model, _ = load_weights(kind, title, name)
    if needs_texts and model.text_model is None:
        raise ValueError(
            f"{name} is a classifier of {model.config.medium}s, without a text encoder. Give the model that it started from; for "
            "the classes of a folder, see scripts/embed.py --output_file."
        )
    with explained(title, name):
        for tower, backbone in model.towers.items():
            probe(backbone, tower)
    return model


def _config_of(name: str, fields: dict[str, Any]) -> PreTrainedConfig:
    if fields["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"{name} has the model_type {fields['model_type']}, which transformers {transformers.__version__} does not know. Give another."
        )
    return AutoConfig.for_model(**fields)


def _backbone(
    args: ModelArguments, tower: str, tokenizer: PreTrainedTokenizerBase, medium: str = "image"
) -> tuple[PreTrainedModel, str]:
    """Load or make a backbone; return it with its pooling."""
    name = getattr(args, f"{tower}_model_name_or_path")
    pooling = "auto"
    if name:
        made, pooling = load_tower(name, tower)
    elif tower == "vision":
        size = {"image_size": args.image_size} if args.image_size else {}
        made = vision_tower(_config_of(args.vision_config, {**vision_preset(args, medium), **size}))
    else:
        words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        made = AutoModel.from_config(_config_of(args.text_config, {**preset(args.text_config, TEXT_PRESETS), **words}))
    if tower == "vision" and medium not in media_of(made):
        flag = f"--vision_model_name_or_path is {name}" if name else f"--vision_config is {args.vision_config}"
        raise ValueError(
            f"{flag}; a {type(made).__name__} like this one reads {'s or '.join(media_of(made))}s, and the data are {medium}s. "
            f"Choose another, or give --vision_config tiny, which is made for {medium}s."
        )
    if tower == "vision" and name and args.image_size:
        made = resize(made, args.image_size)
    if hasattr(made.config, "apply_spec_augment"):
        made.config.apply_spec_augment = False  # its masks are drawn by NumPy, so that no step could be repeated
    return made, pooling


def media_of(backbone: Any) -> tuple[str, ...]:
    """Return the kinds of media that a backbone can read."""
    shape = input_shape(backbone)
    if input_name(backbone) in ("input_values", "input_features") or shape[0] == 1:
        return ("sound",)
    return ("clip",) if len(shape) == 4 else ("image", "clip")


def check_model(name: str, flag: str = "--model_name_or_path") -> Any:
    """Return the configuration of the whole model that a flag names, a folder or a Hub id.

    Raises:
        ValueError: if it is not one, with what to give instead.
    """
    title = f"{flag} is {name}"
    path = Path(name)
    # The Hub id of a whole model has one slash.
    problem = missing(name if "/" in name else f"./{name}") or ("there is no such folder." if path.is_file() else "")
    if problem:
        problem = problem.removesuffix(" Check the path.")
        raise ValueError(f"{title}; {problem} Give the folder of a run, or a Hub id such as owner/name.")
    return _config_of_whole(title, name)


def open_model(name: str) -> tuple[Any, Any]:
    """Return the whole model of `--model_name_or_path` as it is, in evaluation mode, and its processor; raise as `check_model`."""
    check_model(name)
    model = load_model(name, fusion_layers=0).eval()  # a stock one gets no head
    model.processor = load_processor_of(name)
    return model, model.processor


def _config_of_whole(title: str, name: str) -> Any:
    """Load the configuration of a whole model, one of ours or of `DUAL_ENCODERS`; ValueError if it is another's."""
    config = load_config(title, name)
    if config.model_type in (FusionDualEncoderConfig.model_type, *DUAL_ENCODERS):
        return config
    towers = ["vision", "text"]
    if not hasattr(config, "vision_config") and hasattr(config, "num_channels") != hasattr(config, "vocab_size"):
        towers = ["vision"] if hasattr(config, "num_channels") else ["text"]
    flags = " and ".join(f"--{tower}_model_name_or_path {shlex.quote(name)}" for tower in towers)
    raise ValueError(
        f"{title}; that is a {config.model_type}, and those that are taken as a whole are {', '.join(DUAL_ENCODERS)} and runs of "
        f"scripts/pretrain.py. To train one from it, give scripts/pretrain.py {flags}."
    )


@torch.no_grad()
def fit_positions(model: FusionDualEncoderModel, max_seq_length: int) -> None:
    """Let the text tower read captions of so many tokens: a CLIP's table of positions is stretched (Long-CLIP, arXiv 2403.15378).

    Its first rows stay as they are, since few captions of CLIP's training were longer; those behind are interpolated linearly.

    Raises:
        ValueError: if another tower has positions for fewer tokens.
    """
    tower: Any = model.text_model
    most = text_positions(tower)
    if most is None or max_seq_length <= most:
        return
    if tower.config.model_type != "clip_text_model":
        raise ValueError(
            f"--max_seq_length is {max_seq_length}; the text backbone has positions for {most} tokens. Give at most {most}."
        )
    part = tower.embeddings
    table = part.position_embedding.weight
    behind = F.interpolate(
        table[_KEPT_POSITIONS:].T[None], max_seq_length - _KEPT_POSITIONS, mode="linear", align_corners=True
    )[0].T
    rows = torch.cat([table[:_KEPT_POSITIONS], behind])
    part.position_embedding = nn.Embedding.from_pretrained(rows, freeze=not table.requires_grad)
    part.register_buffer("position_ids", torch.arange(max_seq_length)[None], persistent=False)
    tower.config.max_position_embeddings = max_seq_length
    model.config.text_config = tower.config
    logger.info("The text tower reads %d tokens in place of %d; its positions are stretched", max_seq_length, most)
