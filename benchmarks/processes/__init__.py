"""Several processes: what they exchange, wait for and learn."""
