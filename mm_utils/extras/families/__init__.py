"""Whole models and towers of others: at another image size, with another text tower, in another library's format."""
