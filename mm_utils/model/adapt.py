"""Adapt a model to training: unused parameters, checkpointing, dropout, adapters.

Adapters are low-rank (LoRA, arXiv 2106.09685), by peft, in the attention of a tower. The factor alpha / rank is 1, so a merged
weight is W + B A. A checkpoint holds the merged model, which loads without peft, and beside it the adapters, from which a run
resumes: the weights under them are those that the run started from.
"""

import copy
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from mm_utils.model.fusion import on_gpu
from mm_utils.model.join import probe_input
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, image_backbone, input_shape, is_trained
from mm_utils.sharding import load_full_weights

logger = logging.getLogger(__name__)

_DINOV3_POSITIONS = {"pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"}  # random in training, like dropout
FILE = "adapters.safetensors"
_ADAPTER = ".lora_"
_BASE = ".base_layer."


def freeze_unused(model: Any) -> int:
    """Freeze the parameters that no output of the model depends on; return their total size.

    These are mask tokens, unused poolers and the like. DDP would wait for their gradients and fail. The objectives decide later
    which of the heads are trained.
    """
    was_training = model.training
    model.eval()
    images = torch.randn(2, *input_shape(model.vision_model))
    token_ids = torch.ones(2, 4, dtype=torch.long)
    output = model(input_ids=token_ids, pixel_values=images, return_loss=True)
    scalar = sum(output[name].sum() for name in ("loss", "logits", "match_logits") if output.get(name) is not None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(scalar, trained, allow_unused=True) if trained else []
    unused = [parameter for parameter, gradient in zip(trained, gradients, strict=True) if gradient is None]
    for parameter in unused:
        parameter.requires_grad_(False)
    model.train(was_training)
    return sum(parameter.numel() for parameter in unused)


def use_channels_last(tower: nn.Module) -> None:
    """Lay convolutions out as they run fastest, unless they have five dimensions, over frames."""
    if all(parameter.dim() <= 4 for parameter in tower.parameters()):
        tower.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class PatchProduct(nn.Conv2d):
    """A convolution that cuts pixels into patches; on a GPU a matrix product, which takes a tenth of the time."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the patches' embeddings, `[B, E, h, w]`."""
        if not on_gpu(input):
            return super().forward(input)
        high, wide = self.kernel_size
        height = input.shape[2] // high
        width = input.shape[3] // wide
        # rows and columns that fill no patch are left out, as a convolution does
        grid = input[:, :, : height * high, : width * wide]
        # [B, 3, H, W] -> [B, h, w, 3 x high x wide], as the weight is laid out
        patches = grid.unflatten(3, (width, -1)).unflatten(2, (height, -1)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def multiply_patches(tower: nn.Module) -> None:
    """Put a `PatchProduct` of the same parameters in the place of the convolution of pixels, if its patches lie side by side."""
    for parent in [*tower.modules()]:
        for name, conv in parent.named_children():
            if (
                type(conv) is nn.Conv2d
                and (conv.stride, conv.padding, conv.dilation, conv.groups) == (conv.kernel_size, (0, 0), (1, 1), 1)
                and conv.in_channels <= 4  # of later ones there are enough channels for a convolution to be fast
            ):
                side: Any = conv.kernel_size
                # on meta: no weights are drawn
                made = PatchProduct(conv.in_channels, conv.out_channels, side, side, device="meta")
                made.weight = conv.weight
                made.bias = conv.bias
                setattr(parent, name, made.train(conv.training))


def switch_off_dropout(model: FusionDualEncoderModel) -> None:
    """Set both backbones' dropout to 0, as CLIP and SigLIP train; configs stay.

    These are attributes of modules, floats whose names contain `drop`, the `p` of torch's dropout, and fields of the configs
    that some modules read in every forward.

    Raises:
        ValueError: if a backbone still draws random numbers in training.
    """
    for name, tower in model.towers.items():
        highest = 0.0
        for module in tower.modules():
            own_config = vars(module).get("config")
            if isinstance(own_config, PreTrainedConfig) and module is not tower:
                module.config = copy.copy(own_config)  # the tower's own config is saved
                _zero(module.config)
                for field in _DINOV3_POSITIONS & vars(module.config).keys():
                    setattr(module.config, field, None)
            highest = max(highest, _zero(module))
        if highest and is_trained(tower):
            logger.info("The %s backbone trains without its own dropout (%g)", name, highest)
        if not _repeats_in_training(tower, name):
            raise ValueError(
                f"a {tower.config.model_type} draws random numbers in training although its dropout is off. Choose another "
                "backbone."
            )


def _zero(holder: object) -> float:
    """Set the probabilities of dropout among an object's attributes to 0; return the highest."""
    is_dropout = "drop" in type(holder).__name__.lower()
    names = [
        name
        for name, value in vars(holder).items()
        if ("drop" in name or (name == "p" and is_dropout)) and isinstance(value, float) and value > 0
    ]
    highest = max((getattr(holder, name) for name in names), default=0.0)
    for name in names:
        setattr(holder, name, 0.0)
    return highest


@torch.no_grad()
def _repeats_in_training(tower: PreTrainedModel, name: str) -> bool:
    """Return whether a tower returns equal outputs for equal inputs in training mode."""
    was_training = tower.training
    # drop-path keeps or drops whole rows, so take several
    inputs = {field: value.repeat_interleave(4, 0) for field, value in probe_input(tower, name).items()}
    tower.train()
    for module in tower.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # which needs several values, and would count the probe
    first = tower(**inputs, return_dict=True)["last_hidden_state"]
    second = tower(**inputs, return_dict=True)["last_hidden_state"]
    tower.train(was_training)
    return torch.equal(first, second)


# -- low-rank adapters --------------------------------------------------------------------------------------------------


def add_adapters(model: FusionDualEncoderModel, rank: int) -> None:
    """Freeze the towers that are trained; add adapters to attention's linear layers. ValueError if there is nothing to adapt."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"--lora_rank is {rank}; adapters need peft, which is not installed. Run pip install peft."
        ) from error
    every = {**model.towers, "vision": image_backbone(model.vision_model)}
    towers = {name: tower for name, tower in every.items() if is_trained(tower)}
    if not towers:
        raise ValueError(f"--lora_rank is {rank}; both towers are frozen. Freeze less, or give no rank.")
    for name, tower in towers.items():
        layers = attention_layers(tower)
        if not layers:
            raise ValueError(
                f"--lora_rank is {rank}; a {tower.config.model_type} has no attention to adapt. Leave --lora_rank out or, to adapt the "
                f"other tower alone, add --freeze_{name}."
            )
        tower.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
        inject_adapter_in_model(config, tower)


def attention_layers(tower: nn.Module) -> list[str]:
    """Return the linear layers in modules named attention or attn that are called.

    `nn.MultiheadAttention`, of which SigLIP's pooler has one, reads the weight of its layer, which is of a subclass.
    """
    layers = [name for name, module in tower.named_modules() if type(module) is nn.Linear]
    return [name for name in layers if re.search("attention|attn", name.lower())]


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapters in a state dict, if any, into the weights under them."""
    found = {}
    for name, value in weights.items():
        if _ADAPTER in name:
            continue
        # 'x.query.base_layer.weight' -> 'x.query', 'weight'
        layer, _, kind = name.partition(_BASE)
        if kind == "weight":
            up = weights[f"{layer}.lora_B.default.weight"]
            down = weights[f"{layer}.lora_A.default.weight"]
            value = (value.float() + up.float() @ down.float()).to(value)
        found[f"{layer}.{kind}" if kind else name] = value
    return found


def save_adapters(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters in a state dict, if any, into a checkpoint."""
    adapters = {name: value.contiguous() for name, value in weights.items() if _ADAPTER in name}
    if adapters:
        save_file(adapters, folder / FILE)


@torch.no_grad()
def load_weights(model: FusionDualEncoderModel, folder: Path) -> None:
    """Load the weights of a checkpoint on all ranks; a model with adapters keeps the weights under them, and loads these.

    Raises:
        ValueError: if the checkpoint has no adapters and the model has, or it is of another model.
    """
    stored = dict(type(model).from_pretrained(folder, use_safetensors=True).state_dict())
    own = model.state_dict()
    if any(_ADAPTER in name for name in own):
        if not (folder / FILE).is_file():
            raise ValueError(f"{folder} holds no {FILE}; it was written without --lora_rank. Resume without it, too.")
        kept = {name: value for name, value in own.items() if _BASE in name}
        stored = {name: value for name, value in stored.items() if name in own} | kept | load_file(folder / FILE)
    load_full_weights(model, stored)
