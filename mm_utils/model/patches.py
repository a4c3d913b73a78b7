"""Drop a random share of every image's patches in training."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mm_utils.model.modeling_fusion_dual_encoder import input_shape
from mm_utils.model.row_noise import RowNoise


class PatchDropout(RowNoise):
    """Dropout of patches (FLIP, arXiv 2212.00794).

    Args:
        share: share of the patches to drop.
        patches: number of patches of an image; they are the last tokens.
    """

    place = 2

    def __init__(self, share: float, patches: int):
        super().__init__()
        self.patches, self.kept = patches, max(1, round(patches * (1 - share)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Drop a share of each image's patches `[n, N, C]` in training; the order stays."""
        if not self.training:
            return tokens
        noise = self.uniform(len(tokens), self.patches, tokens.device)
        order = noise.argsort(dim=1, stable=True)[:, : self.kept].sort(1).values
        special = tokens.shape[1] - self.patches
        chosen = tokens[:, special:].gather(1, order[..., None].expand(-1, -1, tokens.shape[2]))
        return torch.cat([tokens[:, :special], chosen], 1)


def drop_patches(vision_model: PreTrainedModel, share: float) -> None:
    """Drop a random share of every image's patches in training, see `PatchDropout`.

    Raises:
        ValueError: if the backbone does not embed an image as `[B, tokens, C]`, the patches last.
    """
    embeddings, config = getattr(vision_model, "embeddings", None), vision_model.config
    shape, patch = input_shape(vision_model), getattr(config, "patch_size", None)
    of_images = len(shape) == 3 and shape[0] == 3
    patches = (shape[1] // patch) * (shape[2] // patch) if of_images and isinstance(patch, int) else 0

    probed = embeddings(torch.zeros(1, *shape)) if embeddings is not None and patches else None
    if embeddings is None or not isinstance(probed, Tensor) or probed.dim() != 3 or probed.shape[1] < patches:
        raise ValueError(
            f"--patch_dropout is {share}; a {config.model_type} has no row of patch tokens to drop from. Use a ViT, or 0."
        )
    # a submodule, so that `set_row_keys` finds it
    embeddings.patch_dropout = PatchDropout(share, patches)
    embeddings.register_forward_hook(lambda module, given, tokens: module.patch_dropout(tokens))
