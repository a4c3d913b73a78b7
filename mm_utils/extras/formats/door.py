"""What these formats add to the core, see `mm_utils.doors`."""

_HERE = "mm_utils.extras.formats"
SOURCES = {
    "imagefolder": f"{_HERE}.caption_files.read_caption_files",
    "classes": f"{_HERE}.classes.read_classes",
    "coco": f"{_HERE}.annotations.read_coco",
    "karpathy": f"{_HERE}.annotations.read_karpathy",
    "flickr": f"{_HERE}.annotations.read_flickr",
}
TEXT_FORMATS = {"annotations": f"{_HERE}.annotations.format_of"}
"""What returns the format of a text file by its suffix and its beginning, or None."""
CAPTIONED = {"files": f"{_HERE}.caption_files.is_captioned"}
"""What tells whether the media of a folder have captions beside them, so that it is an `imagefolder`."""
ADDRESSES = dict.fromkeys(("http", "https"), f"{_HERE}.downloads.UrlImage")
"""By scheme, the `ImageRef` of an address."""
