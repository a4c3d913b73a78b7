"""The flags of placement, and the callback that each of them attaches."""

import re
from dataclasses import dataclass

from mm_utils.arguments import Parsed, arg
from mm_utils.training.callbacks import RunCallback


@dataclass
class PlacementArguments:
    """Which process has which encoder, and how many pairs."""

    balance: bool = arg(
        False,
        "Give slower processes fewer pairs, by their speed at every start: for GPUs of several kinds. It changes what is learnt in "
        "the last digits only.",
    )
    placement: str = arg(
        "together",
        "Encoders on processes: together (both on each), or apart (images on half of them, texts on the others; apart:3 = images "
        "on 3). It does not change what is learnt.",
    )

    def __post_init__(self) -> None:
        if re.fullmatch(r"together|apart(:[1-9]\d*)?", self.placement) is None:
            raise ValueError(
                f"--placement is {self.placement}; give together, apart (images on half of the processes), or apart:N for N "
                "processes with the images."
            )
        if self.balance and self.placement != "together":
            raise ValueError(
                f"--placement is {self.placement}; --balance assigns images and texts together, by speed. Drop it, or use together."
            )


class Placement(RunCallback):
    """What attaches `Apart` or `Balance`; a run has one of them at most."""

    arguments = PlacementArguments
    flag = "balance placement"

    @classmethod
    def attach(cls, given: Parsed) -> RunCallback | None:
        """Return the callback that the flags ask for."""
        placed = given[PlacementArguments]
        if placed.balance:
            if given["streaming"]:
                raise ValueError(
                    "--balance is set; a stream is assigned to processes by groups of shards, in equal shares. Drop it, or "
                    "--streaming."
                )
            from mm_utils.extras.placement.balance import Balance

            return Balance()
        if placed.placement != "together":
            from mm_utils.extras.placement.preparation import Apart

            return Apart(placed.placement)
        return None
