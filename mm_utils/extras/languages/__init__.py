"""Languages of captions: a multilingual tokenizer's own codes, and those of a card."""
