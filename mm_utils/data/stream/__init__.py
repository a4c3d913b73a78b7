"""Pairs read shard by shard while training goes on."""
