"""Reasons for which rows, images and captions are set aside, and notes on conversions."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mm_utils.model.reading import UnreadableError
from mm_utils.text import redact, shortened

REASONS = {
    # rows
    "malformed_row": "The line cannot be parsed. Repair it; if it is the last line, the file may be incomplete.",
    "not_an_object": "The row has no named columns. Write one JSON object a line, or a CSV file with a header.",
    "bad_encoding": "The text is not UTF-8. Save the file as UTF-8.",
    "missing_column": "The row lacks a required column. Add it, or name the right one, such as image_column.",
    "too_nested": "The row is nested too deeply to be data. Remove it.",
    "duplicate_key": "The row names a column twice. Keep one of them.",
    "duplicate_id": "Another row has the same id. Give each its own id, or name another id column.",
    "unmatched_image": "No caption belongs to the file. Add a row for it, or remove it.",
    "unmatched_caption": "No file belongs to the caption. Add the file, or remove the caption.",
    "unknown_split": "Splits are train, validation and test. Rename it, or remove its rows.",
    "bad_regions": "The regions are not a list of boxes inside the image with phrases. Write x, y, width, height in pixels.",
    # paths, archives
    "image_missing": "There is no such file. Check the path, and set --image_root to the folder where paths begin.",
    "not_a_file": "The path is not a regular file. Point it at one.",
    "outside_root": "The path leaves the data folder. Copy the files into it, set --allow_outside_root or, for the paths of a "
    "table, --image_root to a folder above them.",
    "path_too_long": "The path is longer than file systems allow. Shorten it; files written as base64 text are decoded beforehand.",
    "list_of_frames": "Frames are no medium by themselves. Join those of each row into a video, as docs/media.md#frames shows, and name that file.",
    "bad_path": "The path cannot be opened. Write a plain relative path, or bytes and path in Parquet.",
    "permission_denied": "The file may not be read. Change its permissions.",
    "read_error": "The file could not be read, even after retries. Check the disk or the network mount.",
    "url_not_allowed": "It is an address. Download the files first, for example with aws s3 sync or img2dataset, whose tar shards are read here.",
    "unsafe_member": "The archive member is a link, a device, a pickle or a path that leads out. Repack the archive.",
    "truncated_archive": "The archive ends too early, or is compressed. Copy it again, or decompress it.",
    "incomplete_sample": "The files of a sample follow each other in a shard and have one name up to the first dot: NAME.jpg, "
    "NAME.txt. Write the shard so: tar --sort=name.",
    "repeated_member": "The archive holds it twice. Write the archive anew, with one of them.",
    "linked_folder": "The folder is a link and is not entered. Give its target as a source of its own, or copy it.",
    "hidden": "Programs keep thumbnails, copies and settings there. Rename it if it holds your data.",
    "not_read": "No row names the file, or its kind is none that is read here. Add rows for it, or give it as a source.",
    "table_not_read": "Tables and JSON files of another kind or place are not read here. Give each as a source of its own, with "
    "--image_root for the folder of its images, or write its texts into the table that is read.",
    "archive_not_read": "Archives beside other data are not read. Unpack them, or give tar shards as a source of their own.",
    "text_not_read": "Captions, or labels, come from elsewhere. Write these texts into the table that is read, or remove them.",
    # images
    "image_empty": "The image has 0 bytes. Fetch it again.",
    "image_truncated": "The image ends too early. Fetch it again.",
    "image_unreadable": "The image cannot be decoded. Fetch it again, or save it again with an image editor.",
    "image_corrupt": "Part of the image is damaged, although decoders show it. Fetch it again, or save it again.",
    "image_unknown_format": "The file is in no format that is read here. Convert it to JPEG or PNG, or install what is named.",
    "no_image": "The file is no image. Fetch the image that the page or pointer stands for (git lfs pull), or give videos as clips.",
    "zero_size": "The image has no width or no height. Fetch it again.",
    "too_many_bytes": "The file is too large. Shrink it, or raise --max_image_bytes of prepare_data.",
    "too_many_pixels": "It has too many pixels. Shrink it, or raise --max_image_pixels of prepare_data.",
    "too_many_parts": "A file of that many parts is built to keep decoders busy. Save it again.",
    "too_small": "The image is smaller than --min_image_side. Lower the limit, or use a larger image.",
    "extreme_aspect": "The image is longer than --max_aspect_ratio allows. Raise the limit, or crop the image.",
    # sounds and clips
    "needs_av": "Only PyAV reads this kind of file. Install it: pip install av.",
    "medium_empty": "The file holds no sound, or no frame. Fetch it again.",
    "medium_truncated": "The file ends before its own header says. Fetch it again.",
    "medium_unreadable": "The file cannot be decoded. Fetch it again, or convert it, for example to FLAC or MP4.",
    "medium_unknown_format": "The file is not a known sound or video. Fetch it again if it is a web page or a Git LFS pointer, or convert it, for "
    "example to FLAC or MP4.",
    "no_audio_stream": "The file holds no sound. Name the file that has it, or give the row as a clip.",
    "no_video_stream": "The file holds no moving picture. Name the file that has it, or give the row as another medium.",
    "silent": "There is no sound in it. Record it again, or remove the row.",
    "bad_sound_rate": "No sound has such a sampling rate. Save it again with the right one.",
    "too_long": "It is longer than --max_seconds of prepare_data. Raise it, or name a part by start and end.",
    "bad_times": "Times are numbers of seconds. Write them so.",
    "bad_moments": 'The moments are not a list of span and phrase. Write {"span": [start, end], "phrase": ...}.',
    "span_outside": "The span leaves the sound or clip. Give seconds from its beginning.",
    "span_empty": "The span has no length. Give its start and its end in seconds.",
    "span_reversed": "The span ends before it begins. Exchange its start and its end.",
    # captions
    "caption_null": "The caption is null. Write one, or remove the row.",
    "caption_empty": "The caption has no readable text. Write one, or remove the row.",
    "caption_nan": "The caption is a program's placeholder for no value. Write one, or remove the row.",
    "caption_not_text": "The caption is not text. Write texts there, or in a column that caption_column names.",
    "caption_list": "A program wrote a list of captions as text. Write a JSON list, or a row a caption.",
    "caption_is_file_name": "The caption is a file name or web address. Write what is to be seen or heard.",
    "no_caption_left": "The row has no usable caption. Write one, or remove the row.",
    # labels
    "bad_label": "The label is missing, or neither a name nor a number. Set --label_column, or choose data whose labels are public.",
    # between rows
    "leaked": "It is also in an evaluation split. Keep it there only.",
}
"""reason -> its meaning and the remedy."""

NOTES = {
    # images
    "animated_first_frame": "The first frame of an animation was taken.",
    "multi_page_first": "The first page or picture of several was taken.",
    "exif_rotated": "The camera's rotation was applied.",
    "alpha_on_white": "Transparency was laid on white.",
    "palette_converted": "Palette colours were converted.",
    "cmyk_converted": "Print colours were converted without a profile.",
    "sixteen_bit_scaled": "16-bit grey was scaled to 8 bits.",
    "float_scaled": "Floats or 32-bit numbers were scaled to 8 bits.",
    # sounds and clips
    "packets_skipped": "A few damaged packets of a stream were skipped.",
    "turned": "The rotation that a camera wrote into a video was applied.",
    "frames_fitted": "Frames of several sizes were given the size of the first.",
    "moment_cut": "A moment was cut where its sound or clip is cut, or left out if it lies outside of the cut.",
    # captions
    "caption_controls_removed": "Control characters or terminal escapes were removed.",
    "caption_surrogate_replaced": "Broken Unicode was replaced by U+FFFD.",
    "caption_cut": "The caption was cut at --max_caption_characters.",
    "caption_composed": "Letters and their accents were composed (NFC).",
    "caption_spaces_joined": "Line breaks and runs of spaces became single spaces.",
    "caption_markup": "The caption holds HTML entities or tags, such as &amp;; it was kept. html.unescape() mends entities.",
    "caption_mojibake": "The caption looks like UTF-8 that was decoded twice (cafÃ© for café); it was kept. ftfy mends it.",
    "caption_repeated": "A caption given twice in a row was kept once.",
}
"""note -> the conversion."""

UNREAD = ("hidden", "not_read", "table_not_read", "archive_not_read", "text_not_read")
"""Reasons of files that no row names: they are counted, and are no rows."""
MOST_BAD = 0.5  # of a source's rows, which may be left out
_EXCERPT = 200
_LONGEST_DETAIL = 1000
_LONGEST_READ = 10_000  # characters; redacting reads more than is shown


class Fault(ValueError):
    """A row that cannot be used; `reason` is a key of `REASONS`, `detail` one printable line, `raw` the row's text, if it is known."""

    def __init__(self, reason: str, detail: str, raw: str = ""):
        detail = shortened(escaped(detail[:_LONGEST_READ]), _LONGEST_DETAIL)
        super().__init__(reason, detail, raw)
        self.reason = reason
        self.detail = detail
        self.raw = raw

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}. {REASONS[self.reason]}"


@contextmanager
def unreadable_as_fault() -> Iterator[None]:
    """Turn what `mm_utils.model.reading` cannot read into a fault."""
    try:
        yield
    except UnreadableError as error:
        raise Fault(error.reason, str(error)) from error


def is_hopeless(bad: int, count: int, most: float = MOST_BAD) -> bool:
    """Return whether too many rows of a source are bad for it to have been meant to be read so."""
    return bad > most * count or not count


def escaped(text: str) -> str:
    """Escape everything that is not printable, line breaks too, so that `text` is one line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def excerpt(text: str) -> str:
    """Return the beginning of a text, escaped, in at most 200 characters."""
    text = escaped(text[:_LONGEST_READ])
    if len(text) > _EXCERPT:
        text = redact(text)
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"


def storable(text: str) -> str:
    """Escape lone surrogates, such as bytes of old file names, which UTF-8 cannot store."""
    return text.encode("utf-8", "backslashreplace").decode()


def first_repeated(names: Iterable[Any]) -> Any:
    """Return the first name that is a repeat, or None."""
    return next((name for name, times in Counter(names).items() if times > 1), None)
