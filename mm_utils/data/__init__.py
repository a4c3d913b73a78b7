"""From raw sources to batches. Nothing here imports a model."""
