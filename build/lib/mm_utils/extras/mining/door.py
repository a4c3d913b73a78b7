"""What mining adds to the core, see `mm_utils.doors`."""

ARRANGEMENTS = {"similar_captions": "mm_utils.extras.mining.similar_captions.group_similar"}
"""What puts rows in an order whose blocks stay together in batches."""
