"""A model that reads its embeddings from the pixels, and a batch of regions."""

from typing import Any

import torch
from torch import Tensor

from mm_utils import distributed
from mm_utils.objectives.grounding.pointing import PointingEvaluator
from tests.kit.truthful_model import ACCELERATOR

IMAGES, SLOTS, CELLS = 11, 3, 4


class GridModel:
    """The pixels of an image are the embeddings of its cells, and the ids of a phrase are its embedding."""

    region_head: Any = True

    def vision_features(self, pixel_values: Tensor, with_taps: bool) -> tuple[None, tuple[Tensor]]:
        return None, (pixel_values,)

    def cell_embeds(self, taps: tuple[Tensor]) -> Tensor:
        return taps[0].permute(0, 2, 3, 1)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.pad(input_ids.float(), (0, 3 - input_ids.shape[1])), None


def whole_batch() -> dict[str, Any]:
    """Images of none to three regions; the fourth cannot be decoded, so it is not a row."""
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(0, SLOTS + 1, (IMAGES,), generator=generator)
    mask = (torch.arange(SLOTS) < counts[:, None]).long()[..., None].expand(-1, -1, 3)
    boxes = torch.rand(IMAGES, SLOTS, 2, 2, generator=generator).sort(2).values.flatten(2)
    return {
        "pixel_values": torch.randn(IMAGES, 3, CELLS, CELLS, generator=generator),
        "rows": torch.tensor([row for row in range(IMAGES + 1) if row != 3]),
        "region_boxes": boxes,
        "region_input_ids": torch.randint(-9, 9, (IMAGES, SLOTS, 3), generator=generator) * mask,
        "region_attention_mask": mask,
        "region_keys": torch.arange(IMAGES * SLOTS).view(IMAGES, SLOTS),
    }


def batches(size: int, rank: int = 0, world: int = 1) -> list[dict[str, Any]]:
    whole, mine = whole_batch(), distributed.share(IMAGES, rank, world)
    starts = range(mine.start, mine.stop, size)
    parts = [slice(low, min(low + size, mine.stop)) for low in starts]
    return [{name: value[part] for name, value in whole.items()} for part in [*parts, slice(0, 0)]]


def measured(size: int) -> dict[str, float]:
    loader = batches(size, distributed.rank(), distributed.world_size())
    return PointingEvaluator()(GridModel(), loader, ACCELERATOR)  # type: ignore[arg-type]
