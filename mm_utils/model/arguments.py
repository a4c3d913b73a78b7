"""The flags of a model and of its objective, and what towers from scratch are made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_utils.arguments import arg
from mm_utils.files import read_json

# As of the model, whose file loads torch:
PROJECTIONS = ("linear", "mlp")
CLASSIFIER_INPUTS = ("fused", "pair", "image")
VISION_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "convnext", "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], "num_stages": 3,
             "patch_size": 4, "image_size": 64, "layer_scale_init_value": 1.0, "initializer_range": 0.08},
    "small": {"model_type": "vit", "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6,
              "intermediate_size": 1536, "patch_size": 16, "image_size": 224},
    "base": {"model_type": "vit", "patch_size": 16, "image_size": 224},
    # Over log-mel spectrograms of 40 frames a second, 32 frequencies high: any number of frames.
    "sound-tiny": {"model_type": "convnext", "num_channels": 1, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2],
                   "num_stages": 3, "patch_size": 4, "image_size": [200, 32], "layer_scale_init_value": 1.0,
                   "initializer_range": 0.08},
}  # fmt: skip
VISION_PRESETS["clip-tiny"] = {**VISION_PRESETS["tiny"], "image_size": 32}  # over every frame
TEXT_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "bert", "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
             "intermediate_size": 768, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "small": {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6,
              "intermediate_size": 1536},
    "base": {"model_type": "bert"},
}  # fmt: skip

# Terms of `mm_utils.objectives.build`, and those of them that compare images and texts:
TERMS = "contrastive", "sigmoid", "captioning", "matching", "regions", "moments", "distillation"
COMPARING = "contrastive", "sigmoid", "distillation"
COMPARES_NOTHING = (
    "--objectives is {!r}; no term of it compares images and texts. Add contrastive, sigmoid, or an EmbeddingTerm of your own, "
    "with a weight above 0."
)


@dataclass(kw_only=True)
class TowerArguments:
    """What is trained of the two towers."""

    freeze_vision: bool = arg(False, "Do not train the vision backbone.", usual=True)
    freeze_text: bool = arg(
        False, "Do not train the text backbone, nor the projection of a run's text encoder.", usual=True
    )
    cache_features: bool = arg(
        False,
        "Run the towers frozen by --freeze_vision or --freeze_text once, and train from their stored output. Images are "
        "then seen as their centre square, without crops, and clips as the mean of their frames.",
    )
    lora_rank: int = arg(
        0,
        "Train adapters of this rank in the attention of the towers that are not frozen, and nothing else in these; 0 = no adapters.",
        most=4096,
    )
    gradient_checkpointing: bool = arg(
        False, "Recompute activations in the backward pass: less memory, a third slower.", decides="speed"
    )


@dataclass
class ModelArguments(TowerArguments):
    """The two towers and the fusion head.

    A saved model wins over pretrained backbones, and these win over presets.
    """

    model_name_or_path: str | None = arg(
        None,
        "Start from a whole model, a folder or a Hub id: that of a run, or a CLIP, SigLIP, Chinese CLIP or "
        "VisionTextDualEncoderModel, for sounds a CLAP, for clips any of those for images; it gets the head of --fusion_layers.",
        usual=True,
    )
    vision_model_name_or_path: str | None = arg(
        None,
        "Pretrained vision backbone: a folder or a Hub id. For sounds AST, Whisper, Wav2Vec2, HuBERT or CLAP, of which the sound "
        "tower is taken; for clips VideoMAE, TimeSformer, ViViT, V-JEPA 2, or an image backbone, which looks at every frame.",
        usual=True,
    )
    text_model_name_or_path: str | None = arg(
        None,
        "Pretrained text backbone: a folder or a Hub id. Beside --model_name_or_path it takes the place of that model's, whose "
        "image side stays as it is and is not trained, so that its indexes stay valid. The folder of a run gives its whole text "
        "encoder, with the projection; with --freeze_text both models embed a text alike, so that it finds the media of both.",
        usual=True,
    )
    vision_config: str = arg(
        "tiny",
        "Vision backbone from scratch: tiny, small, base, or a config.json. Tiny is sound-tiny for sounds, a ConvNeXt over "
        "log-mel spectrograms, and clip-tiny for clips, tiny over every frame, of 32 pixels, with two layers over time.",
        decides="place",
    )
    text_config: str = arg("tiny", "Text backbone from scratch: tiny, small, base, or a config.json.", decides="place")
    vocab_size: int = arg(
        8192, "Largest vocabulary of a tokenizer trained on the captions.", decides="place", least=6, most=10**6
    )
    add_tokens: str | None = arg(
        None,
        "Words that become one token each, with commas between, such as <en>,<de> in front of captions; their rows of a "
        "pretrained embedding begin at its mean, and are saved with the model.",
    )
    image_size: int | None = arg(
        None,
        "Side of the square image; default: what the vision backbone expects. The positions of a trained one are interpolated.",
        decides="place",
        usual=True,
        least=1,
        most=4096,
    )
    projection_dim: int | None = arg(
        None,
        "Width of the shared embedding space; default: 256, or 3/4 of a narrower text backbone.",
        decides="place",
        least=1,
        most=2**16,
    )
    projection: str = arg(
        "linear",
        "From a backbone's output to the embedding: linear; or mlp, linear and beside it a small network with much dropout, for "
        "frozen backbones and some thousand images. Stock transformers classes have only linear ones.",
    )
    fusion_layers: int = arg(2, "Blocks of the cross-attention head; 0 = no head.", usual=True, most=100)
    torch_compile: bool | None = arg(
        None,
        "Compile the layers of towers and fusion head with torch.compile: seconds at the start, then faster steps; default: on a GPU, "
        "for 1,000 steps and more.",
        decides="speed",
    )

    def __post_init__(self) -> None:
        own = "vision_model_name_or_path", "vision_config", "text_config", "vocab_size", "projection_dim", "projection"
        for name in own if self.model_name_or_path else ():
            if getattr(self, name) != getattr(ModelArguments, name):
                raise ValueError(
                    f"--{name} is {getattr(self, name)}, and --model_name_or_path is {self.model_name_or_path}; a whole model "
                    "has its own, and the flag would change nothing. Drop one of the two."
                )
        if blank := [word for word in self.new_tokens if len(word.split()) > 1]:
            raise ValueError(f"--add_tokens has {blank[0]!r}; a token holds no blank. Put commas between tokens.")
        if self.joins_whole:
            self.freeze_vision = True
        if self.add_tokens is not None and (self.freeze_text or self.lora_rank):
            raise ValueError(
                f"--add_tokens is {self.add_tokens}; the text backbone's embedding is frozen, and they would learn nothing. Give "
                "--freeze_text false, and no --lora_rank."
            )
        if self.projection not in PROJECTIONS:
            raise ValueError(f"--projection is {self.projection!r}; choose one of {', '.join(PROJECTIONS)}.")
        for name, presets in (("vision_config", VISION_PRESETS), ("text_config", TEXT_PRESETS)):
            value = getattr(self, name)
            if value not in presets and not Path(value).is_file():
                raise ValueError(f"--{name} is {value!r}; give {', '.join(presets)} or the path of a config.json.")
            preset(value, presets)

    @property
    def new_tokens(self) -> list[str]:
        """The words of `--add_tokens`."""
        return [word.strip() for word in (self.add_tokens or "").split(",") if word.strip()]

    @property
    def pretrained(self) -> bool:
        """Whether any backbone that is trained starts from trained weights."""
        text = self.text_model_name_or_path and not self.freeze_text
        return bool(self.model_name_or_path or self.vision_model_name_or_path or text)

    @property
    def joins_whole(self) -> bool:
        """Whether a new text tower joins the image side of a whole model."""
        return bool(self.model_name_or_path and self.text_model_name_or_path)

    @property
    def frame_layers(self) -> int:
        """Layers over time of an image tower that reads clips: none where it runs once, since they would stay what they begin as."""
        return 0 if self.freeze_vision and self.cache_features else 2


@dataclass
class ObjectiveArguments:
    """The terms of the loss and their weights."""

    objectives: str = arg(
        "contrastive:1,captioning:1",
        "Terms and weights: contrastive (InfoNCE) or sigmoid (SigLIP); matching (the fusion head classifies pairs); captioning "
        "(it predicts words); regions (phrases point into their boxes); moments (phrases find their spans of clips and "
        "sounds); distillation (soft targets of --teacher_name_or_path); or module.Class, a term of your own.",
        usual=True,
    )
    teacher_name_or_path: str | None = arg(
        None,
        "A larger dual encoder whose similarities the towers learn as soft targets, a folder or a Hub id as of "
        "--model_name_or_path, or st:FOLDER of a SentenceTransformer of images and texts; adds distillation:1 to --objectives unless it is there. It runs once over the training data.",
        decides="place",
    )

    def __post_init__(self) -> None:
        self.weights  # noqa: B018  (complain now, not after the data is loaded)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term, by name."""
        weights = {}
        for term in self.objectives.split(","):
            name, _, weight = term.strip().partition(":")  # 'matching:0.5' -> 'matching', '0.5'
            if name in weights:
                raise ValueError(f"--objectives is {self.objectives!r}; it has {name} twice. Keep one of them.")
            try:
                weights[name] = float(weight or 1)  # 'matching' alone weighs 1
            except ValueError:
                raise ValueError(f"--objectives has {term!r}; write name:weight, e.g. matching:0.5.") from None
        if self.teacher_name_or_path:
            weights.setdefault("distillation", 1.0)
        elif weights.get("distillation"):
            raise ValueError(
                f"--objectives is {self.objectives!r}; distillation learns from a teacher, and there is none. Give "
                "--teacher_name_or_path."
            )
        found = {name: weight for name, weight in weights.items() if weight}
        if not all(0 <= weight < math.inf for weight in weights.values()):
            raise ValueError(f"--objectives is {self.objectives!r}; a weight is a finite number of at least 0.")
        if {"contrastive", "sigmoid"} <= found.keys():
            raise ValueError(
                f"--objectives is {self.objectives!r}; contrastive and sigmoid share one temperature. Drop one of them."
            )
        if unknown := [name for name in weights if name not in TERMS and "." not in name]:
            raise ValueError(
                f"--objectives has {unknown[0]!r}; there is no such term. Choose of {', '.join(TERMS)}, or write module.Class."
            )
        if not any(name in COMPARING or "." in name for name in found):
            raise ValueError(COMPARES_NOTHING.format(self.objectives))
        return found


def check_reads(name: str, reads: Sequence[str], medium: str) -> None:
    """Raise ValueError if a whole model does not read the medium of the data."""
    if medium not in reads:
        raise ValueError(
            f"--model_name_or_path is {name}; it reads {'s or '.join(reads)}s, and the data are {medium}s. Choose a model of {medium}s or, "
            "for clips, one of images as transformers saves it, such as a run's dual_encoder/; or two encoders by "
            "--vision_model_name_or_path and --text_model_name_or_path."
        )


def vision_preset(args: ModelArguments, medium: str) -> dict[str, Any]:
    """Return the fields of the vision backbone from scratch; `tiny` is the medium's own."""
    # 'tiny' -> 'clip-tiny' or 'sound-tiny'
    own = f"{medium}-tiny" if medium != "image" and args.vision_config == "tiny" else args.vision_config
    return preset(own, VISION_PRESETS)


def preset(name: str, presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the preset of this name, or the content of the config.json of this path."""
    if name in presets:
        return presets[name]
    try:
        config = read_json(Path(name))
    except ValueError as error:
        raise ValueError(
            f"{name} is no JSON ({error}). Give {', '.join(presets)}, or the config.json of a backbone."
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{name} has no model_type. Give {', '.join(presets)}, or the config.json of a backbone.")
    return config
