"""A row source for the tables of a SQLite database."""
