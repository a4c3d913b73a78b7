"""Encoders on different processes: each encoder has some of the processes to itself."""
