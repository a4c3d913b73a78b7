"""`--micro_batch_size auto`: how many pairs fit into the memory of a process, by trials."""
