"""Why a row, an image or a caption is set aside, and what was converted: every name with its explanation."""

REASONS = {
    # rows
    "malformed_row": "The line cannot be parsed. Repair it; a last line cut short means that the file was still being written.",
    "not_an_object": "The row is no set of named columns. Write one JSON object a line, or a CSV file with a header.",
    "bad_encoding": "The line is not UTF-8. Save the file as UTF-8.",
    "missing_column": "The row lacks a column that is needed. Add it, or name the right one with a flag.",
    "too_nested": "The row is nested too deeply to be data. Remove it.",
    "duplicate_key": "The row names a column twice. Keep one of them.",
    "duplicate_id": "Another row has the same id. Ids name rows: make them unique.",
    "unmatched_image": "No caption belongs to the image. Add a row for it, or remove it.",
    "unmatched_caption": "No image belongs to the caption. Add the image, or remove the caption.",
    "unknown_split": "The split is neither train, validation nor test. Rename it.",
    "bad_regions": "The regions are no list of boxes inside the image, each with its phrase. Write x, y, width, height.",
    "languages_mismatch": "There are not as many languages as captions. Give one for each, or none.",
    # paths, downloads, archives
    "image_missing": "There is no such file. Check the path and the folder that paths are relative to.",
    "not_a_file": "The path leads to something that is no regular file. Point it at the image.",
    "outside_root": "The path leads out of the data folder. Move the image inside, or give its folder as the root.",
    "path_too_long": "The path is longer than file systems allow. Shorten it.",
    "bad_path": "The path is none that can be opened. Use a plain relative path.",
    "permission_denied": "The file may not be read. Change its permissions.",
    "read_error": "The file could not be read, tries included. Check the disk or the network mount.",
    "url_not_allowed": "The image is a web address. Download it first, or allow downloads.",
    "private_address": "The web address leads into a private network. Copy the image into the data folder.",
    "download_failed": "The image could not be downloaded. Check the address, and run again to retry.",
    "unsafe_member": "The archive member is a link, a device or a path that leads out. Pack the archive anew.",
    "truncated_archive": "The archive ends too early. Copy it again.",
    # images
    "image_empty": "The image has 0 bytes. Fetch it again.",
    "image_truncated": "The image ends too early. Fetch it again.",
    "image_unreadable": "The image cannot be decoded. Fetch it again, or save it anew with an image editor.",
    "image_corrupt": "Part of the image is damaged, although decoders show it. Fetch it again, or save it anew.",
    "image_unknown_format": "It is none of the formats that are read. Convert it to JPEG or PNG.",
    "zero_size": "The image has no width or no height. Fetch it again.",
    "too_many_bytes": "The file is larger than --max_image_bytes. Raise that, or shrink the image.",
    "too_many_pixels": "The image is larger than --max_image_pixels. Raise that, or shrink the image.",
    "too_many_parts": "A file of so many parts is built to keep decoders busy. Save it anew with an image editor.",
    "too_small": "The image is smaller than --min_image_side. Lower that, or use a larger image.",
    "extreme_aspect": "The image is longer than --max_aspect_ratio allows. Raise that, or crop the image.",
    # captions
    "caption_null": "The caption is null. Write one, or remove the row.",
    "caption_empty": "The caption holds nothing to read. Write one, or remove the row.",
    "caption_nan": "The caption is what a program writes for no value. Write one, or remove the row.",
    "caption_not_text": "The caption is no text. Name the column that holds text.",
    "caption_is_file_name": "The caption is a file name or web address. Write what the image shows.",
    "no_caption_left": "The image has no caption that can be used. Write one, or remove the row.",
    # between rows
    "near_duplicate": "Another row has nearly the same image. Keep one of them.",
    "leaked": "The image is in an evaluation split, too. Keep it there only.",
}
"""reason -> what it means, and what to do."""

NOTES = {
    # images
    "animated_first_frame": "The first frame of an animation was taken.",
    "multi_page_first": "The first page or picture of a file of several was taken.",
    "exif_rotated": "The camera's rotation was applied.",
    "alpha_on_white": "Transparency was laid on white.",
    "palette_converted": "Palette colours were converted.",
    "cmyk_converted": "Print colours were converted without a profile.",
    "sixteen_bit_scaled": "16-bit grey was scaled to 8 bits.",
    "float_scaled": "Floats or 32-bit numbers were scaled to 8 bits.",
    "trailing_bytes": "Bytes after the end of the image were ignored.",
    "wrong_extension": "The name ends as another format's; the content decided.",
    # captions
    "caption_controls_removed": "Control characters or terminal escapes were removed.",
    "caption_surrogate_replaced": "Broken Unicode was replaced by U+FFFD.",
    "caption_cut": "The caption was cut at --max_caption_characters.",
    "caption_special_token": "The caption holds text that looks like a tokenizer's special token; it was kept as text.",
    "caption_repeated": "A caption given twice for an image was kept once.",
}
"""note -> what was done."""


class Fault(ValueError):
    """A row that cannot be used: `reason` is a key of `REASONS`, `detail` says what exactly was found."""

    def __init__(self, reason: str, detail: str):
        detail = shown(detail)
        super().__init__(reason, detail)
        self.reason, self.detail, self._explanation = reason, detail, REASONS[reason]

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}. {self._explanation}"


def shown(text: str) -> str:
    """The text with line breaks, terminal escapes and all else that does not print as escapes: it stays one line of a log."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
