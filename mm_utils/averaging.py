"""An exponential moving average of the weights, evaluated and saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mm_utils.sharding import like


class WeightAverage:
    """Follows the parameters of `model`: average <- decay x average + (1 - decay) x parameter, after every step."""

    file = "ema.safetensors"  # in a checkpoint

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.values: dict[str, Tensor] = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Move one step towards the parameters as they are now."""
        for name, value in self.model.named_parameters():
            self.values[name].lerp_(value, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model's parameters are the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def load(self, folder: Path) -> None:
        """Take up the average in a checkpoint. Called on all ranks.

        Raises:
            ValueError: if the checkpoint was written without an average.
        """
        if not (folder / self.file).is_file():
            raise ValueError(f"{folder} holds no {self.file}; it was written without --ema_decay. Resume it so, too.")
        for name, value in load_file(folder / self.file).items():
            self.values[name].copy_(like(value, self.values[name]))

    @torch.no_grad()
    def _swap(self) -> None:
        for name, value in self.model.named_parameters():
            held = value.clone()
            value.copy_(self.values[name])
            self.values[name].copy_(held)
