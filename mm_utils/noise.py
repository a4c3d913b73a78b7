"""Random numbers that are pure functions of what they are for: of a key and of the ids of rows, not of their order.

So a draw depends neither on how many processes there are nor on how a batch is cut, and is repeated by a resumed run.
"""

import torch
from torch import Tensor


def pair_keys(ids_n2: Tensor) -> Tensor:
    """One int64 hash `[n]` of two ids."""
    return _mix(_mix(ids_n2[:, 0]) + ids_n2[:, 1])


def uniform_noise(rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """Uniform numbers in (0, 1), `[rows, columns]`, of `key` and two int64 vectors, equal on every device."""
    bits = _mix(_mix(columns + key * 0x9E3779B1 % 2**62)[None] + _mix(rows)[:, None] * 0x2545F491)
    return ((bits & 0x7FFFFF) + 0.5) / 2**23  # 23 bits and a half are exact in fp32, so never 0 or 1


def gumbel_noise(rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """As `uniform_noise`, with a standard Gumbel distribution."""
    return -torch.log(-torch.log(uniform_noise(rows, columns, key)))


def _mix(bits: Tensor) -> Tensor:
    """Scramble int64 values (the finaliser of splitmix64, with shifts that ignore the sign; products wrap around)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))
