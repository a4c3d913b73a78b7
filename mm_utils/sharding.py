"""What FSDP2 must know of the model."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from mm_utils.modeling_fusion_dual_encoder import Attention, FusionDualEncoderModel, FusionHead, FusionLayer


def register_forward_methods(objective: nn.Module) -> None:
    """Tell FSDP2 which methods besides `forward` use a module's weights, so that it gathers them there too."""
    methods = {
        FusionDualEncoderModel: ("encode_image", "encode_text", "project_image", "project_text", "match_pairs"),
        FusionHead: ("encode_vision",),
        FusionLayer: ("encode_image",),
        Attention: ("keys_values",),
    }
    for module in objective.modules():
        for kind, names in methods.items():
            if isinstance(module, FSDPModule) and isinstance(module, kind):
                for name in names:
                    register_fsdp_forward_method(module, name)
