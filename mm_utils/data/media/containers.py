"""Open sound and video by FFmpeg (PyAV), within limits; put the frames on one clock.

The clock of a file counts seconds from its beginning, the same for all of its streams: a sound that starts 0.3 s after the
pictures stays 0.3 s behind them. Containers with time stamps of their own (MP4, Matroska, AVI, ASF, FLV) count from 0; one
that begins more than a second later was cut out of a recording, and counts from its first frame, as do all others, whose
stamps start anywhere.

Files are untrusted. The kind is decided by the first bytes, before FFmpeg sees them; only demuxers of such files are
allowed, and none of them may open a second file. Streams, frames and pixels have limits.
"""

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mm_utils.data.faults import Fault
from mm_utils.data.images import decoder_message

TOLERANCE = 0.25  # seconds by which a span may leave its medium: annotators round
_DEMUXERS = (
    "mov,mp4,matroska,webm,avi,asf,flv,mpegts,mpeg,ogg,flac,mp3,aac,wav,w64,aiff,au,caf,amr,amrnb,amrwb,ac3,eac3"
)
_OWN_CLOCK = ("mov", "matroska", "avi", "asf", "flv")
_CUT_OUT = 1.0  # second
_SIGNATURES = {
    "WAV": re.compile(rb"(RIFF|RF64)....WAVE", re.DOTALL),
    "AVI": re.compile(rb"RIFF....AVI ", re.DOTALL),
    "MP4": re.compile(rb"....(ftyp|moov|mdat|wide|free|skip)", re.DOTALL),
    "Matroska": re.compile(rb"\x1aE\xdf\xa3"),
    "Ogg": re.compile(rb"OggS"),
    "FLAC": re.compile(rb"fLaC"),
    "MP3": re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]"),
    "AAC": re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"),
    "AIFF": re.compile(rb"FORM....AIF[FC]", re.DOTALL),
    "AU": re.compile(rb"\.snd"),
    "CAF": re.compile(rb"caff"),
    "AMR": re.compile(rb"#!AMR"),
    "AC-3": re.compile(rb"\x0bw"),
    "ASF": re.compile(rb"0&\xb2u\x8ef\xcf\x11"),
    "FLV": re.compile(rb"FLV\x01"),
    "MPEG-TS": re.compile(rb"G.{187}G", re.DOTALL),
    "MPEG-PS": re.compile(rb"\0\0\x01\xba"),
}
_SECOND = {
    "WAV": rb"RIFF....WAVEfmt ",
    "MP4": rb"ftyp(?<=\0\0\0.ftyp)",
    "Matroska": rb"\x1aE\xdf\xa3([\x80-\xff]|[\x40-\x7f].|\x01.{7})\x42\x86\x81",
    "FLAC": rb"fLaC[\0\x80]\0\0\x22",
    "AIFF": rb"FORM....AIF[FC]",
    "ASF": rb"0&\xb2u\x8ef\xcf\x11\xa6\xd9\0\xaa\0\x62\xce\x6c",
    "FLV": rb"FLV\x01[\x01\x04\x05]\0\0\0\x09\0\0\0\0",
    None: rb"GIF8[79]a|\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR|RIFF....WEBPVP8",
}
"""kind -> how a file of it begins, at such length that no compressed sound or picture holds it; the others are played on."""
_HEIF = re.compile(rb"....ftyp(avi[fs]|hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
_FOREVER = 1e9  # seconds
_MOST_STREAMS = 64
_MOST_DAMAGED = 0.02  # share of the packets of a stream that may fail, beside the first two
_SEEK_FROM, _SEEK_BACK = 10.0, 1.0  # seconds: where seeking pays; decoders need a while to come to the right sound


def signature(content: bytes) -> str | None:
    """Return the kind of a sound or video file by its first bytes, None for any other file."""
    if _HEIF.match(content):
        return None
    return next((name for name, magic in _SIGNATURES.items() if magic.match(content)), None)


def holds_second(content: bytes) -> bool:
    """Return whether another file of the same kind follows a sound or clip, as `cat` joins them, which decoders leave or mix."""
    magic = _SECOND.get(signature(content))
    return magic is not None and re.compile(magic, re.DOTALL).search(content, 16) is not None


@contextmanager
def open_container(content: bytes) -> Iterator[Any]:
    """Open a file of sound or video as an `av` container.

    Raises a `Fault`, and turns what PyAV raises inside of the block into one: needs_av, medium_unknown_format,
    too_many_parts, medium_truncated or medium_unreadable.
    """
    kind = signature(content)
    if kind is None:
        raise Fault("medium_unknown_format", f"it begins with {content[:16]!r}")
    if kind == "MP4" and b"moov" not in content:
        raise Fault("medium_truncated", "MP4 without its index, which programs write last")
    try:
        import av
    except ImportError as error:
        raise Fault("needs_av", f"{kind} is not read without PyAV") from error
    options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "", "max_streams": str(_MOST_STREAMS)}
    try:
        with av.open(io.BytesIO(content), options=options, metadata_errors="replace", io_open=_refuse) as container:
            yield container
    except Fault:
        raise
    except EOFError as error:
        raise Fault("medium_truncated", f"{kind}: {decoder_message(error)}") from error
    except Exception as error:  # FFmpeg's errors, ValueError, MemoryError and others, as the bytes have it
        if isinstance(error, MemoryError):
            raise Fault("too_many_parts", f"{kind} of more than {_MOST_STREAMS} streams, or of a huge one") from error
        raise Fault("medium_unreadable", f"{kind}: {decoder_message(error)}") from error


def best_stream(container: Any, kind: str) -> Any:
    """Return the `video` or `audio` that players show; raise no_video_stream, no_audio_stream."""
    streams = getattr(container.streams, kind)
    if len(container.streams) > _MOST_STREAMS:
        raise Fault("too_many_parts", f"{len(container.streams):,} streams")
    usable = [stream for stream in streams if stream.codec_context is not None and not _is_cover(stream)]
    best = container.streams.best(kind)
    found = best if best in usable else next(iter(usable), None)
    if not container.streams.video and not container.streams.audio:
        raise Fault("medium_unreadable", f"{container.format.name} without a stream that can be read")
    if found is None:
        held = ", ".join(sorted({str(stream.type) for stream in container.streams})) or "no streams"
        raise Fault(f"no_{kind}_stream", f"{container.format.name} that holds {held}")
    found.codec_context.thread_count = 1
    return found


def clock_zero(container: Any) -> float:
    """Return the time stamp in seconds at which the clock of a file begins."""
    start = (container.start_time or 0) / 1e6
    own = container.format.name.split(",")[0] in _OWN_CLOCK
    return 0.0 if own and start <= _CUT_OUT else start


def declared_end(container: Any, stream: Any) -> float | None:
    """Return a stream's end on the file's clock by the header; None where it only guesses."""
    if container.format.name in ("mp3", "aac", "mpegts", "mpeg", "amr", "ac3", "eac3"):
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float((stream.duration + (stream.start_time or 0)) * stream.time_base) - clock_zero(container)
    if container.duration is not None and container.format.name.startswith("matroska"):  # counts from 0
        return container.duration / 1e6 - clock_zero(container)
    if container.duration is not None:
        return (container.duration + (container.start_time or 0)) / 1e6 - clock_zero(container)
    return None


def decoded(container: Any, stream: Any, start: float, notes: list[str]) -> Iterator[tuple[float | None, Any]]:
    """Yield a stream's frames with their times on the file's clock, None where they have none.

    Args:
        start: seconds; frames that end before it may be left out.
        notes: packets_skipped is added if a few could not be decoded.

    Raises a `Fault`: medium_unreadable if it were more.
    """
    zero, packets, failed = clock_zero(container), 0, 0
    if start >= _SEEK_FROM:
        _seek(container, start + zero - _SEEK_BACK)
    for packet in _packets(container, stream):
        packets += 1
        try:
            frames = packet.decode()
        except Exception as error:  # see `open_container`
            failed += 1
            if failed > max(2, _MOST_DAMAGED * packets) and failed > 2:
                raise Fault(
                    "medium_unreadable", f"{failed:,} of {packets:,} packets: {decoder_message(error)}"
                ) from error
            continue
        for frame in frames:
            yield None if frame.pts is None else float(frame.pts * frame.time_base) - zero, frame
    if failed:
        notes.append("packets_skipped")


def check_cut(start: float | None, end: float | None, seconds: float | None = None) -> None:
    """Check what a row states as the part of a file that it is about, in seconds.

    Raises a `Fault`: span_reversed, span_empty, or span_outside.
    """
    begin = 0.0 if start is None else start
    if begin < 0:
        raise Fault("span_outside", f"it starts at {begin:g} s")
    if end is not None and end < begin:
        raise Fault("span_reversed", f"from {begin:g} to {end:g} s")
    if end is not None and end == begin:
        raise Fault("span_empty", f"from {begin:g} to {end:g} s")
    if seconds is not None and (begin >= seconds or (end is not None and end > seconds + TOLERANCE)):
        raise Fault("span_outside", f"{begin:g} to {seconds if end is None else end:g} s of {seconds:.3f} s")


def seconds_of(value: Any) -> float:
    """Return a time that a row states, in seconds; raises bad_times."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < _FOREVER:
        raise Fault("bad_times", f"{value!r:.80} is not a time in seconds")
    return float(value)


def check_length(seconds: float, most: float) -> None:
    """Raise too_long if a medium, or its wanted part, has more than `most` seconds."""
    if seconds > most + TOLERANCE:
        raise Fault("too_long", f"it has {seconds:,.1f} s or more, and --max_seconds is {most:g}")


def check_whole(end: float, said: float | None, is_exact: bool = False) -> None:
    """Raise medium_truncated if a stream ends at `end`, long before the header says, or at all where that counts samples."""
    if said is not None and end < said - (0.01 if is_exact else max(0.5, 0.05 * said)):
        raise Fault("medium_truncated", f"it ends at {end:.2f} s of {said:,.2f}")


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream; a file that breaks off ends there."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except Exception as error:  # see `open_container`
            if isinstance(error, MemoryError):
                raise
            return
        if packet is None:
            return
        yield packet


def _seek(container: Any, to: float) -> None:
    """Go to a key frame before a time stamp, if the file can."""
    try:
        container.seek(int(max(0.0, to) * 1e6))
    except OSError:  # of FFmpeg: then everything is decoded from the beginning
        container.seek(0)


def _is_cover(stream: Any) -> bool:
    """Return whether a stream is the picture on the cover of a recording."""
    return "attached_pic" in str(stream.disposition).lower()


def _refuse(url: str, flags: int, options: Mapping[str, str]) -> Any:
    raise PermissionError(f"the file names another one, {url}, which is not opened")
