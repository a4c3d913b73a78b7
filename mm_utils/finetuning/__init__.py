"""Classes: fine-tuning a classifier, and zero-shot classification by the names of classes."""
