"""Launches that restart their processes: each start meets at an address of its own."""
