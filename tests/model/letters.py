"""A small text tower of letters."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from tests.kit.stock_folders import chinese_tokenizer


def write_bert(folder: Path) -> str:
    """Write a random BERT, 40 channels wide, with its tokenizer."""
    torch.manual_seed(1)
    tokenizer = chinese_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=40, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
