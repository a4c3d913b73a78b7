"""Tar shards: samples of members with one name, as WebDataset and img2dataset write them."""
