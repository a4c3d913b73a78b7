"""Search images by text or by image: an index of embeddings, queries, and a local page."""
