"""Evaluate a model of several media."""
