"""What preparing data writes: the report, its pictures, and the card of a data set."""
