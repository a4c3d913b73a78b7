"""What FSDP2 must know of the model."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from mm_utils.modeling_fusion_dual_encoder import (
    Attention,
    FusionDualEncoderForClassification,
    FusionDualEncoderModel,
    FusionHead,
    FusionLayer,
    RegionHead,
)
from mm_utils.objectives import JointObjective

_SCALARS = ("logit_scale", "logit_bias")


def without_scalars(objective: nn.Module) -> None:
    """Make vectors of one of temperature and bias, in place: FSDP2 refuses to shard scalars."""
    for parameter in objective.parameters():
        if not parameter.dim():
            parameter.data = parameter.data.view(1)


def register_forward_methods(objective: nn.Module) -> None:
    """Tell FSDP2 which methods besides `forward` use a module's weights, so that it gathers them there too."""
    methods = {
        JointObjective: ("encode", "part"),
        FusionDualEncoderModel: (
            *("encode_image", "encode_text", "vision_features", "text_features", "project_image", "project_text"),
            "match_pairs",
            *("token_logits", "caption_logits", "caption_scores", "region_embeds", "cell_embeds"),
        ),
        FusionDualEncoderForClassification: ("classify",),
        FusionHead: ("encode_vision", "encode_text", "match_logits", "decode"),
        FusionLayer: ("encode_image",),
        Attention: ("keys_values",),
        RegionHead: ("cells",),
    }
    for module in objective.modules():
        for kind, names in methods.items():
            if isinstance(module, FSDPModule) and isinstance(module, kind):
                for name in names:
                    register_fsdp_forward_method(module, name)


def with_scalars(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights with temperature and bias as scalars again."""
    return {name: value.squeeze() if name in _SCALARS else value for name, value in weights.items()}
