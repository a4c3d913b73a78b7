"""Run the training scripts on a Ray cluster: workers, restarts, other numbers of workers, sweeps."""
