"""Boxes cover cells exactly, of whatever grid a vision tower returns."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.ops import roi_align
from transformers import AutoConfig, AutoModel

from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.grounding.terms import cells_covered


def boxes_of(count: int, seed: int = 0) -> Tensor:
    corners = torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(seed)).sort(1).values
    return corners.flatten(1)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (3, 7)])
def test_boxes_are_means_by_area(height: int, width: int) -> None:
    """As RoIAlign does it to the map drawn so large that a cell is 32 pixels wide, but exactly."""
    grid = torch.randn(3, 5, height, width, generator=torch.Generator().manual_seed(1))
    boxes, image = boxes_of(40), torch.arange(40) % 3
    large = grid.repeat_interleave(32, 2).repeat_interleave(32, 3)
    pixels = boxes * 32 * torch.tensor([width, height, width, height])
    rois = torch.cat([image[:, None].float(), pixels], 1)
    expected = roi_align(large, rois, 1, sampling_ratio=64, aligned=True)[:, :, 0, 0]
    weight = cells_covered(boxes, height, width)
    mean = torch.einsum("rhw,rchw->rc", weight / weight.sum((1, 2), keepdim=True), grid[image])
    torch.testing.assert_close(mean, expected, atol=0.02, rtol=0)


def test_small_and_empty_boxes() -> None:
    inside = torch.tensor([[0.55, 0.3, 0.6, 0.31], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 1.0, 1.0]])
    weight = cells_covered(inside, 4, 4)
    assert weight.sum((1, 2)).tolist() == pytest.approx([0.2 * 0.04, 0, 16], abs=1e-6)
    assert weight[0, 1, 2].item() == pytest.approx(0.2 * 0.04, abs=1e-6)


def vision(kind: str) -> Any:
    configs: dict[str, dict[str, Any]] = {
        "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "image_size": 32},
        "vit": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
                "patch_size": 8, "image_size": 32},
        "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "patch_size": 4,
                 "image_size": 32},
    }  # fmt: skip
    return AutoModel.from_config(AutoConfig.for_model(kind, **configs[kind]))


def model_of(kind: str, taps: Sequence[int] = (-1,), fusion_layers: int = 1) -> FusionDualEncoderModel:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text_model = AutoModel.from_config(AutoConfig.for_model("bert", **text, vocab_size=50))
    return join_backbones(vision(kind), text_model, fusion_layers=fusion_layers, fusion_vision_taps=list(taps)).eval()


@pytest.mark.parametrize("kind", ["convnext", "vit", "swin"])
def test_every_kind_of_tower_has_regions(kind: str) -> None:
    """Maps, tokens behind a class token, tokens alone."""
    model = model_of(kind)
    model.add_region_head()
    taps = model.vision_features(torch.rand(2, 3, 32, 32))[1]
    assert model.cell_embeds(taps).shape == (2, 4, 4, model.config.projection_dim)


def test_cells_are_where_the_image_is() -> None:
    model = model_of("vit")
    model.add_region_head()
    tokens = torch.zeros(1, 17, 16)
    tokens[0, 1 + 4 * 2 + 3, 0] = 5.0  # third row, fourth column, behind the class token
    cells = model.cell_embeds((tokens,))
    others = (cells - cells[0, 0, 0]).norm(dim=-1)[0]
    assert others.argmax() == 11
    assert (others > 1e-3).sum() == 1


def test_models_without_regions_say_so() -> None:
    plain = model_of("vit")
    assert not any("region" in name for name in plain.state_dict())
    with pytest.raises(ValueError, match=r"no embeddings of regions\. Train it with regions"):
        plain.cell_embeds((torch.rand(1, 17, 16),))
    plain.add_region_head()
    with pytest.raises(ValueError, match="the last of fusion_vision_taps has 35 tokens"):
        plain.cell_embeds((torch.rand(1, 35, 16),))
    with pytest.raises(ValueError, match="fusion_layers=0"):
        model_of("vit", fusion_layers=0).add_region_head()
