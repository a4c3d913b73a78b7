"""The model: architecture, construction, tokenizer, adapters."""
