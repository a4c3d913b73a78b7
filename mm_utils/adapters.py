"""Low-rank adapters in the attention of a tower, by peft (LoRA, arXiv 2106.09685); what is saved has them merged.

The factor alpha / rank is 1, so a merged weight is W + B A. A checkpoint holds the merged model, which loads without peft,
and the adapters beside it, from which a run goes on: the weights under them are those that it started from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mm_utils.arguments import arg
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.sharding import load_whole

FILE = "adapters.safetensors"
_ADAPTER, _BASE = ".lora_", ".base_layer."


@dataclass
class LoraArguments:
    """Which towers learn by adapters."""

    lora_rank: int = arg(
        0, "Train adapters of this rank in the attention of --lora_towers, and nothing else in these; 0 = no adapters."
    )
    lora_towers: str = arg("vision,text", "The towers that get adapters: vision, text, or both.")

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ValueError(f"--lora_rank is {self.lora_rank}; give a rank from 1 on, or 0 for no adapters.")
        if not self.towers or set(self.towers) - {"vision", "text"}:
            raise ValueError(f"--lora_towers is {self.lora_towers!r}; give vision, text or vision,text.")

    @property
    def towers(self) -> list[str]:
        """Their names."""
        return [name.strip() for name in self.lora_towers.split(",") if name.strip()]


def add_adapters(model: FusionDualEncoderModel, args: LoraArguments) -> None:
    """Freeze the towers that `args` names, and put trained adapters into all linear layers of their attention.

    Raises:
        ValueError: if peft is not installed, or a tower has no attention.
    """
    if not args.lora_rank:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"--lora_rank is {args.lora_rank}; adapters need peft, which is not installed. Run pip install peft."
        ) from error
    for name in args.towers:
        tower = model.vision_model if name == "vision" else model.text_model
        layers = attention_layers(tower)
        if not layers:
            raise ValueError(
                f"--lora_towers is {args.lora_towers}; a {tower.config.model_type} has no attention to adapt. Leave {name} "
                "out."
            )
        tower.requires_grad_(False)
        config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_rank, target_modules=layers)
        inject_adapter_in_model(config, tower)


def attention_layers(tower: nn.Module) -> list[str]:
    """Names of the linear layers in a tower's attention: those below a module that is called so."""
    return [
        name
        for name, module in tower.named_modules()
        if isinstance(module, nn.Linear) and any(word in name.lower() for word in ("attention", "attn"))
    ]


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with its adapters added to the weights under them; one without adapters is given back as it is."""
    found = {}
    for name, value in weights.items():
        if _ADAPTER in name:
            continue
        layer, _, kind = name.partition(_BASE)
        if kind == "weight":
            up, down = (weights[f"{layer}.lora_{side}.default.weight"] for side in "BA")
            value = (value.float() + up.float() @ down.float()).to(value)
        found[f"{layer}.{kind}" if kind else name] = value
    return found


def save_adapters(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters of a state dict into a checkpoint, if it has any."""
    adapters = {name: value.contiguous() for name, value in weights.items() if _ADAPTER in name}
    if adapters:
        save_file(adapters, folder / FILE)


@torch.no_grad()
def load_weights(model: FusionDualEncoderModel, folder: Path) -> None:
    """Take up a checkpoint: all weights, or, of a model with adapters, all but those under them, and the adapters.

    Called on all ranks.

    Raises:
        ValueError: if the model has adapters and the checkpoint has not, or is of another model.
    """
    stored = dict(type(model).from_pretrained(folder, use_safetensors=True).state_dict())
    own = model.state_dict()
    if any(_ADAPTER in name for name in own):
        if not (folder / FILE).is_file():
            raise ValueError(f"{folder} holds no {FILE}; it was written without --lora_rank. Resume it without, too.")
        kept = {name: value for name, value in own.items() if _BASE in name}
        stored = {name: value for name, value in stored.items() if name in own} | kept | load_file(folder / FILE)
    load_whole(model, stored)
