"""Add low-rank adapters to a model that is built."""

from torch import nn

from mm_utils.model.adapt import LoraArguments
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, image_backbone, is_trained


def add_adapters(model: FusionDualEncoderModel, args: LoraArguments) -> None:
    """Freeze the towers that are trained; add adapters to attention's linear layers.

    Raises:
        ValueError: if peft is not installed, a tower has no attention, or all are frozen.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"--lora_rank is {args.lora_rank}; adapters need peft, which is not installed. Run pip install peft."
        ) from error
    both = {"vision": image_backbone(model.vision_model), "text": model.text_model}
    towers = {name: both[name] for name in both if is_trained(both[name])}
    if not towers:
        raise ValueError(f"--lora_rank is {args.lora_rank}; both towers are frozen. Freeze less, or give no rank.")
    for name, tower in towers.items():
        layers = attention_layers(tower)
        if not layers:
            raise ValueError(
                f"--lora_rank is {args.lora_rank}; a {tower.config.model_type} has no attention to adapt. Add --freeze_{name}."
            )
        tower.requires_grad_(False)
        config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_rank, target_modules=layers)
        inject_adapter_in_model(config, tower)


def attention_layers(tower: nn.Module) -> list[str]:
    """Return the linear layers in modules named attention or attn that are called.

    `nn.MultiheadAttention`, of which SigLIP's pooler has one, reads the weight of its layer, which is of a subclass.
    """
    return [
        name
        for name, module in tower.named_modules()
        if type(module) is nn.Linear and any(word in name.lower() for word in ("attention", "attn"))
    ]
