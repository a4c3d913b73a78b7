"""How small embeddings may be: recall over bytes."""
