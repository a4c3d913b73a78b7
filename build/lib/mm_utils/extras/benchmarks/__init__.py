"""Standard benchmarks: their names and tables, and the folders that CLIP_benchmark writes."""
