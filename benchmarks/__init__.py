"""Benchmarks: each module is a script that prints a Markdown table."""
