"""Random numbers of training as functions of row and step, and dropout that draws them.

They depend neither on the number of processes nor on how a batch is cut, and a resumed run repeats them.
"""

import torch
from torch import Tensor, nn


def pair_keys(ids_n2: Tensor) -> Tensor:
    """Hash two ids to one int64, `[n]`."""
    return _mix(_mix(ids_n2[:, 0]) + ids_n2[:, 1])


def row_keys(ids: Tensor, key: int) -> Tensor:
    """Hash ids, `[n]` or `[n, 2]`, and `key` to one int64 for each row, `[n]`."""
    return _mix(_mix(ids if ids.dim() == 1 else pair_keys(ids)) + key)


def uniform_noise(rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """Return uniform numbers in (0, 1), `[rows, columns]`, equal on every device."""
    bits = _mix(_mix(columns + key * 0x9E3779B1 % 2**62)[None] + _mix(rows)[:, None] * 0x2545F491)
    return ((bits & 0x7FFFFF) + 0.5) / 2**23  # 23 bits and a half are exact in fp32, so never 0 or 1


def gumbel_noise(rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """Return numbers as `uniform_noise`, with a standard Gumbel distribution."""
    return -torch.log(-torch.log(uniform_noise(rows, columns, key)))


def _mix(bits: Tensor) -> Tensor:
    """Scramble int64 values by splitmix64's finaliser; shifts ignore the sign."""
    # 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB, less 2^64, as int64 has a sign
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


class RowDropout(nn.Module):
    """Dropout of a share `p` of features `[n, C]`, whose masks in training are functions of the key of each row.

    `place` is a number of the module, so that two modules draw other numbers.
    """

    def __init__(self, p: float, place: int = 1):
        super().__init__()
        self.p = p
        self.place = place
        # int64 `[n]`, of the rows of the next input; None draws from torch's random numbers
        self.keys: Tensor | None = None

    @classmethod
    def replace(cls, layers: nn.ModuleList | nn.Sequential, place: int = 1) -> None:
        """Let the dropout among some layers draw by row, numbered from `place` on."""
        for number, layer in enumerate(layers):
            if isinstance(layer, nn.Dropout):
                layers[number] = cls(layer.p, place)
                place += 1

    def forward(self, features: Tensor) -> Tensor:
        """Zero a share `p` of the features in training, and scale the others."""
        if not self.training or not self.p:
            return features
        if self.keys is None:
            noise = torch.rand(*features.shape, device=features.device)
        elif len(self.keys) == len(features):
            columns = torch.arange(features.shape[1], device=features.device)
            noise = uniform_noise(self.keys.to(features.device), columns, self.place)
        else:
            raise ValueError(
                f"--projection is mlp, whose dropout is drawn by pair; a term of --objectives embeds {len(features)} texts of "
                f"{len(self.keys)} pairs. Drop the term, or the flag."
            )
        return features * (noise >= self.p).to(features) / (1 - self.p)


def set_row_keys(model: nn.Module, keys: Tensor | None) -> None:
    """Set the keys of the rows that the model is given next, for all its `RowDropout`.

    They stay set until the next rows: a layer that is recomputed in the backward pass draws the same numbers again.
    """
    for module in model.modules():
        if isinstance(module, RowDropout):
            module.keys = keys
