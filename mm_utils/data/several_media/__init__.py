"""Several data sets in one run, each of a medium of its own."""
