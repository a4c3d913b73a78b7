"""The callback that opens a stream in place of a data set on disk."""

from typing import Any

from accelerate import Accelerator

from mm_utils.arguments import Parsed
from mm_utils.data.training_data import TrainingData
from mm_utils.extras.streams.flags import StreamingArguments
from mm_utils.training.callbacks import RunCallback


class Streaming(RunCallback):
    """Train from shards."""

    scripts = ("pretrain",)
    arguments = StreamingArguments
    flag = "streaming"
    reads = "stream_interleave shuffle_block_size"

    @classmethod
    def attach(cls, given: Parsed) -> "Streaming":
        """Return the callback with --streaming."""
        return cls()

    def open_data(self, accelerator: Accelerator, given: Parsed, *more: Any) -> TrainingData:
        """Open the stream that the flags name."""
        from mm_utils.extras.streams.data import open_streamed

        return open_streamed(accelerator, given, *more)
