"""The flags of streams."""

from dataclasses import dataclass

from mm_utils.arguments import arg

GROUPS = 64


@dataclass
class StreamingArguments:
    """Reading of a source larger than the disk."""

    streaming: bool = arg(False, "Read shards while training instead of loading the data set first.")
    stream_interleave: int = arg(
        0,
        f"Groups of shards whose rows are interleaved, over all processes; 0 takes {GROUPS}, or one per shard if there are "
        "fewer. It decides the order.",
        rare=True,
    )
    shuffle_block_size: int = arg(
        256,
        "Rows of a shard that are shuffled among themselves; each group holds as many encoded images in memory.",
        rare=True,
    )

    def __post_init__(self) -> None:
        if self.stream_interleave < 0:
            raise ValueError(
                f"--set stream_interleave is {self.stream_interleave}; give a number of groups, or 0 to leave it open."
            )
        if self.shuffle_block_size < 1:
            raise ValueError(f"--set shuffle_block_size is {self.shuffle_block_size}; give at least 1 row.")
