"""Data: sources, preparing, loading, streaming. Nothing here knows the model."""
