"""Build the optimizer's parameter groups; compute the learning rate of a step."""

import functools
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Adafactor, PreTrainedConfig, get_scheduler

from mm_utils.training.arguments import OptimizerArguments

logger = logging.getLogger(__name__)

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw_torch_fused": (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-6, "fused": True}),
    "adamw_torch": (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-6, "fused": False}),
    "sgd": (torch.optim.SGD, {}),
    # else it would choose its rate by itself
    "adafactor": (Adafactor, {"scale_parameter": False, "relative_step": False}),
}
"""Classes by `transformers`' names, with their settings there."""
_RATE_KEPT = 0.1  # of the peak, by schedules with a least rate
BATCH_EXPONENT = 0.5  # of (batch size / first batch size) in the rate: 1/2 suits Adam (arXiv 2205.10287)
_DECAY_SHARE = 0.2  # of the steps, in which warmup_stable_decay falls
TOWERS = ("vision_model.", "text_model.")
NEW_RATE = 1e-3  # the peak rate of projections, heads, and the tiny backbones
WARMUP_STEPS = 20  # with 1.5 steps of warm-up, small backbones need 20 steps to leave chance
_JOINTS = ("visual_projection", "text_projection", "logit_scale", "logit_bias")

# Class, mask and register tokens, and positions: position_embeddings (BERT, ViT), absolute_pos_embed, wpe (GPT), and tables
# of relative positions (relative_position_bias_table, relative_attention_bias).
_LEARNED_TOKENS = re.compile(
    r"position(?:al)?_(?:embedding|bias_table)|(?:embed|emb)_?positions?|(?:^|[._])pos_?emb|(?:^|\.)wpe\.|relative_attention_bias"
    r"|(?:cls|class|dist\w*|mask|register)_(?:token|embedding)s?$"
)


def scratch_rate(config: PreTrainedConfig) -> float:
    """Return the peak rate of a backbone from scratch: `NEW_RATE`, and less for wide or deep transformers.

    AdamW's first steps move every weight by about the whole rate. At 1e-3, twelve layers of width 384 then embed all images
    alike within ten steps, and the gradient that is left is too small to part them again (docs/training.md#learning-rates).
    """
    width = getattr(config, "hidden_size", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not width or not layers:  # a network of convolutions
        return NEW_RATE
    # 192 wide with 2 layers: 1e-3; 384 wide with 12: 8e-5
    return NEW_RATE * min(1.0, 192 / width * 2 / layers)


def warmup_steps(max_steps: int, args: OptimizerArguments) -> float:
    """Return the steps in which the rate rises."""
    if args.warmup_ratio is not None:
        return args.warmup_ratio * max_steps
    # of 30 steps 12, of 100 steps 20, of 1,000 steps 50
    return max(0.05 * max_steps, min(WARMUP_STEPS, 0.4 * max_steps))


def schedule(step: int, max_steps: int, args: OptimizerArguments) -> float:
    """Return the learning rate of a step, counted from 0, as a share of its peak.

    Cosine learns from the first step on; the others are those of `transformers`, whose first step of a warm-up has a rate of 0.
    """
    warmup = warmup_steps(max_steps, args)
    if args.lr_scheduler_type != "cosine":
        return _schedule_of(args.lr_scheduler_type, math.ceil(warmup), max_steps)(step)
    if step + 1 < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, max_steps - warmup))) if step > warmup else 1.0


@functools.cache
def _schedule_of(name: str, warmup: int, max_steps: int) -> Callable[[int], float]:
    """Return a schedule of `transformers` as a function of the step, so that a resumed run needs no state of it."""
    settings = {"min_lr_rate": _RATE_KEPT} if name.endswith("_with_min_lr") else {}
    if name == "warmup_stable_decay":
        # a long warm-up leaves less than a fifth to fall in
        settings["num_decay_steps"] = min(math.ceil(_DECAY_SHARE * max_steps), max_steps - warmup)
    peak = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)  # rates are then shares of it
    scheduler = get_scheduler(name, peak, warmup, max_steps, settings)
    return scheduler.lr_lambdas[0]


def build_optimizer(
    model: nn.Module, args: OptimizerArguments, *, pretrained: bool, device: torch.device, has_baseline: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of `--optim`: matrices decay, backbones have their own rate, a lower one if they are `pretrained`.

    Low-rank adapters in a backbone learn at the rate of new parameters. With `has_baseline`, projections and temperature are not
    new either, and learn at the backbones' rate. Every group has its peak rate as `peak_lr`; the trainer sets `lr` from it and
    `schedule`.
    """
    rates = _peak_rates(model, args, pretrained, has_baseline)
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # 'model.vision_model.layer...' of an objective, 'vision_model.layer...' of a model
        backbone = any(f".{tower}" in f".{name}" for tower in TOWERS)
        # Matrices of weights decay; learned tokens and positions do not.
        # a table of [1, C] is no matrix
        decays = sum(size > 1 for size in parameter.shape) > 1 and not _LEARNED_TOKENS.search(name)
        group = {"lr": rates[name], "peak_lr": rates[name], "weight_decay": args.weight_decay if decays else 0.0}
        groups.setdefault((backbone, rates[name], decays), {"params": [], **group})["params"].append(parameter)
    if not groups:
        raise ValueError("no parameter is left to train; drop --freeze_vision or --freeze_text")
    every = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    logger.info("%s parameters, %s of them trained", f"{every:,}", f"{trained:,}")
    kind, settings = OPTIMIZERS[args.optim]
    if settings.get("fused") and device.type not in ("cpu", "cuda"):
        settings = {**settings, "fused": False}
    return kind(list(groups.values()), **settings)


def _peak_rates(model: nn.Module, args: OptimizerArguments, pretrained: bool, has_baseline: bool) -> dict[str, float]:
    new = NEW_RATE if args.learning_rate is None else args.learning_rate
    rates = {name: new for name, _ in model.named_parameters()}
    for tower in TOWERS:
        inside = [name for name in rates if f".{tower}" in f".{name}"]
        if not inside:
            continue
        rate = args.backbone_learning_rate
        if rate is None and (pretrained or args.learning_rate is not None):
            rate = 0.1 * new if pretrained else new
        elif rate is None:
            backbone: Any = model.get_submodule(inside[0].rpartition(tower)[0] + tower.rstrip("."))
            rate = scratch_rate(backbone.config)
        rates |= {name: rate for name in inside if ".lora_" not in name}
        if has_baseline:  # projections and temperature are no new parameters either
            rates |= {name: rate for name in rates if name.split(".")[0] in _JOINTS}
    return rates
