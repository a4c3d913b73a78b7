"""Run training scripts on a Ray cluster: workers, restarts, other numbers, sweeps."""
