"""Low-rank adapters in the attention of a tower (LoRA, arXiv 2106.09685), by peft."""
