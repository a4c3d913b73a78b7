"""The model: architecture, construction, tokenizer, adapters, weight average."""
