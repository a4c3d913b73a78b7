"""What is measured at the end of runs that train small embeddings, see `mm_utils.doors`."""

CALLBACKS = {"embedding_sizes": "mm_utils.extras.measured.sizes.EmbeddingSizes"}
