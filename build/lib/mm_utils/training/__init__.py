"""The training loop and what one optimizer step needs."""
