"""Push a model while it is trained, or a prepared data set, to the Hugging Face Hub."""
