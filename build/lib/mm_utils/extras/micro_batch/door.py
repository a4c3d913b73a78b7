"""What the search adds to the core, see `mm_utils.doors`."""

MICRO_BATCHES = {"auto": "mm_utils.extras.micro_batch.search.find_micro_batch_size"}
"""By the value of --micro_batch_size, what returns the pairs that a process holds at a time."""
