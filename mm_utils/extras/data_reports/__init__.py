"""Preparing data as a run of its own: its folder, the check of the result, the report with pictures, and the card."""
