"""From raw rows to a verified pair data set."""
