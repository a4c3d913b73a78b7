"""What these formats add to the core, see `mm_utils.doors`."""

_HERE = "mm_utils.extras.formats"
SOURCES = {
    "classes": f"{_HERE}.classes.read_classes",
    "coco": f"{_HERE}.annotations.read_coco",
    "karpathy": f"{_HERE}.annotations.read_karpathy",
    "flickr": f"{_HERE}.annotations.read_flickr",
    "parallel": f"{_HERE}.parallel.read_parallel",
}
TEXT_FORMATS = {"annotations": f"{_HERE}.annotations.format_of"}
"""What returns the format of a text file by its suffix and its beginning, or None."""
TABLES = {"known": f"{_HERE}.known_tables.known_table"}
"""What returns the usual columns of a table whose columns it knows, and what makes rows of such."""
OWN_CAPTIONS = {"photos": f"{_HERE}.photo_captions.photo_caption"}
"""What returns the caption that an image file has in its metadata, with a note, or None."""
ADDRESSES = dict.fromkeys(("http", "https"), f"{_HERE}.downloads.UrlImage")
"""By scheme, the `ImageRef` of an address."""
