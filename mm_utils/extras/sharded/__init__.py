"""Weights or their gradients in shards: FSDP2 and DeepSpeed."""
