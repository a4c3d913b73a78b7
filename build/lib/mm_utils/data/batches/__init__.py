"""Turn prepared rows into training batches: order, tokens, augmentation, loaders."""
