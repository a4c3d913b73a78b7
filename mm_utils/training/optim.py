"""Parameter groups and the learning rate as a function of the step."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mm_utils.arguments import arg

LR_RULES = {"constant": 0.0, "linear": 1.0, "sqrt": 0.5}
"""The rate is multiplied by (batch size / first batch size) to this power: 1 suits SGD (arXiv 1706.02677), 1/2 Adam
(arXiv 2205.10287)."""
TOWERS = ("vision_model.", "text_model.")

# A block is the first numbered module on the way to a parameter. What lies in stages is numbered twice, the stage and the
# block in it: stages.1.layers.0 (ResNet, ConvNeXt), layers.1.blocks.0 (Swin), block.1.0 (PoolFormer).
_NUMBERED = re.compile(r"(?:[a-z]\w*\.)*?\w+\.\d+(?=\.)")
_STAGED = re.compile(r"((?:[a-z]\w*\.)*?\w+\.\d+)\.(?:(?:layers|blocks)\.)?\d+(?=\.)")


@dataclass
class OptimizerArguments:
    """AdamW and its schedule."""

    learning_rate: float = arg(1e-3, "Peak learning rate of newly initialised parameters.")
    backbone_learning_rate: float | None = arg(
        None, "Peak learning rate of the two backbones; default: a tenth of --learning_rate if pretrained, else equal."
    )
    layerwise_lr_decay: float = arg(
        1.0, "Each block of a backbone learns at this share of the rate of the block above it; 1 = all alike."
    )
    weight_decay: float = arg(0.1, "Decay of matrices; never of norms, biases and scalars.")
    adam_beta1: float = arg(0.9, "AdamW's first moment.")
    adam_beta2: float = arg(0.98, "AdamW's second moment.")
    adam_epsilon: float = arg(1e-6, "AdamW's epsilon.")
    lr_scheduler_type: str = arg(
        "cosine", "'cosine' to zero, or 'constant_with_cooldown' (linear to zero at the end)."
    )
    warmup_ratio: float = arg(0.05, "Share of the steps in which the rate rises linearly from zero.")
    cooldown_ratio: float = arg(0.2, "Share of the steps in which 'constant_with_cooldown' falls to zero.")
    batch_size_lr_rule: str = arg(
        "sqrt", "With --batch_size_schedule, the rate grows with the batch: 'constant' (not), 'linear' or 'sqrt'."
    )
    max_grad_norm: float = arg(1.0, "Clip gradients to this norm; 0 turns clipping off.")

    def __post_init__(self) -> None:
        if self.lr_scheduler_type not in ("cosine", "constant_with_cooldown"):
            raise ValueError(
                f"--lr_scheduler_type is {self.lr_scheduler_type!r}; choose cosine or constant_with_cooldown."
            )
        if self.batch_size_lr_rule not in LR_RULES:
            raise ValueError(
                f"--batch_size_lr_rule is {self.batch_size_lr_rule!r}; choose one of {', '.join(LR_RULES)}."
            )
        if not (self.warmup_ratio >= 0 and self.cooldown_ratio >= 0 and self.warmup_ratio + self.cooldown_ratio <= 1):
            raise ValueError("--warmup_ratio and --cooldown_ratio are shares of the run; together at most 1.")
        if self.learning_rate < 0:
            raise ValueError(f"--learning_rate is {self.learning_rate}; give 0 or more.")
        if not 0 < self.layerwise_lr_decay <= 1:
            raise ValueError(f"--layerwise_lr_decay is {self.layerwise_lr_decay}; give a share in (0, 1], e.g. 0.9.")


def schedule(step: int, max_steps: int, args: OptimizerArguments) -> float:
    """The learning rate of step `step` (from 0) as a share of its peak."""
    warmup = args.warmup_ratio * max_steps
    if step + 1 < warmup:
        return (step + 1) / warmup
    if args.lr_scheduler_type == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, max_steps - warmup))) if step > warmup else 1.0
    cooldown = args.cooldown_ratio * max_steps
    return min(1.0, (max_steps - step) / cooldown) if cooldown else 1.0


def depths_below_the_top(names: Iterable[str]) -> dict[str, int]:
    """How many blocks above each parameter of a backbone learn faster than it, as BEiT counts (arXiv 2106.08254).

    Norms and poolers behind the last block have 0, the last block 1, the first one as many as there are blocks, and what
    comes before it, stem and embeddings, one more. What a stage has beside its blocks goes with the nearest of them.

    Args:
        names: of all parameters, in the order of `named_parameters`, which is that of the forward pass.
    """
    names = list(names)
    stages = {found[1] for name in names if (found := _STAGED.match(name))}
    blocks: dict[str, int] = {}
    begun: set[str] = set()
    place_of: dict[str, int | None] = {}
    for name in names:
        block, numbered = _STAGED.match(name), _NUMBERED.match(name)
        if numbered is None or "embed" in name.partition(".")[0]:
            place_of[name] = None if blocks else 0
        elif block is None and numbered[0] in stages:
            place_of[name] = len(blocks) + (numbered[0] not in begun)
        else:
            begun.add(numbered[0])
            place_of[name] = blocks.setdefault((block or numbered)[0], len(blocks) + 1)
    return {name: 0 if place is None else len(blocks) + 1 - place for name, place in place_of.items()}


def build_optimizer(
    model: nn.Module, args: OptimizerArguments, *, pretrained: bool, device: torch.device
) -> torch.optim.AdamW:
    """AdamW over the trained parameters: matrices decay, backbones may learn at a rate of their own, lower blocks slower.

    What is new in a backbone, low-rank adapters, learns as all else that is new. Every group remembers its peak rate as
    `peak_lr`; the trainer sets `lr` from it and `schedule`.
    """
    rates = _peak_rates(model, args, pretrained)
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        backbone = any(f".{tower}" in f".{name}" for tower in TOWERS)
        rate, decays = rates[name], parameter.dim() > 1
        group = groups.setdefault(
            (backbone, rate, decays),
            {"params": [], "lr": rate, "peak_lr": rate, "weight_decay": args.weight_decay if decays else 0.0},
        )
        group["params"].append(parameter)
    if not groups:
        raise ValueError("no parameter is left to train; drop --freeze_vision or --freeze_text")
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(list(groups.values()), betas=betas, eps=args.adam_epsilon, fused=device.type == "cuda")


def _peak_rates(model: nn.Module, args: OptimizerArguments, pretrained: bool) -> dict[str, float]:
    """The peak rate of every parameter by its name."""
    backbone_rate = args.backbone_learning_rate
    if backbone_rate is None:
        backbone_rate = args.learning_rate * (0.1 if pretrained else 1.0)
    rates = {name: args.learning_rate for name, _ in model.named_parameters()}
    for tower in TOWERS:
        inside = {
            name: name.rpartition(f".{tower}")[2].removeprefix(tower) for name in rates if f".{tower}" in f".{name}"
        }
        depths = depths_below_the_top(inside.values())
        for name, short in inside.items():
            if ".lora_" not in name:
                rates[name] = backbone_rate * args.layerwise_lr_decay ** depths[short]
    return rates
