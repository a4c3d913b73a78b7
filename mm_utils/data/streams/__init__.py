"""Train from Parquet and tar shards without reading them whole."""
