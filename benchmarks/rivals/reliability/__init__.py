"""Trials of reliability: the same faults for Tandem, plain Accelerate and transformers' Trainer."""
