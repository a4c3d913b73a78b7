"""Trials of reliability: equal faults for Tandem, Accelerate and transformers' Trainer."""
