"""Which processes have which encoder: the images on the first ones, the texts on the others."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from mm_utils import distributed
from mm_utils.data.batches.order import Division
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

PARTS = {"vision": ("vision_model", "visual_projection"), "text": ("text_model", "text_projection")}
"""The parts of the model that belong to an encoder; temperature and bias belong to none."""


@dataclass(frozen=True)
class Split:
    """How many processes have the images, and how many the texts; at least one each."""

    vision: int
    text: int

    @property
    def world(self) -> int:
        """The number of all processes."""
        return self.vision + self.text

    @property
    def mine(self) -> str:
        """The encoder of this process: `vision` or `text`."""
        return "vision" if distributed.rank() < self.vision else "text"

    @property
    def first(self) -> dict[str, int]:
        """The first process of each encoder."""
        return {"vision": 0, "text": self.vision}

    @property
    def division(self) -> Division:
        """How rows are assigned to be read, texts too: to the processes that have images."""
        return Division((1.0,) * self.vision + (0.0,) * self.text)

    def text_rows(self, total: int) -> list[range]:
        """Return which of `total` texts each process encodes; none for those with images."""
        shares = [distributed.share(total, part, self.text) for part in range(self.text)]
        return [range(0)] * self.vision + shares


def loss_rows(total: int) -> list[range]:
    """Return for which of `total` pairs each process computes the loss."""
    world = distributed.world_size()
    return [distributed.share(total, part, world) for part in range(world)]


def parameters_of(model: FusionDualEncoderModel, encoder: str | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield an encoder's trained parameters by name; for None, those of no encoder."""
    owner = {part: name for name, parts in PARTS.items() for part in parts}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and owner.get(name.split(".")[0]) == encoder:
            yield name, parameter
