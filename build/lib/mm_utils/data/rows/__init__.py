"""Read every format of image-caption data as records, each with its place or its fault."""
