"""Sources full of broken sounds and clips: each is set aside under its reason, and all good rows come out."""

import json
from pathlib import Path

import pytest

from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.ingest import Storage, read_part
from mm_utils.data.prepare.pipeline import IngestPlan, ingest_sources
from mm_utils.data.prepare.timed import TimedArguments
from mm_utils.data.rows.source import PathArguments, Source
from tests.data.prepare.fault_media import CLIPS, FRAMES, SOUNDS, Case
from tests.kit.fault_images import save
from tests.kit.made_media import animation, picture, tone, wav

PLAN = IngestPlan(CheckArguments(max_image_pixels=10_000), Storage("jpeg", 24, TimedArguments(max_seconds=5)), 1, 1.0)


def write_rows(folder: Path, cases: list[Case], column: str) -> Path:
    """A good row, then each case and another good row behind it."""
    media = folder / "media"
    media.mkdir()
    for name, bright in (("a", False), ("b", True)):
        (folder / f"{name}.png").write_bytes(save(picture(bright), "PNG"))
    (folder / "cut.png").write_bytes(save(picture(False), "PNG")[:60])
    rows = []
    for number, case in enumerate([_GOOD, *(each for one in cases for each in (one, _GOOD))]):
        name = f"media/{number}{case.suffix}"
        content = case.content() if callable(case.content) else case.content
        if case.kind == "good":
            content = wav(tone(0.5, pitch=200 + number)) if column == "audio" else animation(3, flash=number % 3)
        (folder / name).write_bytes(content)
        medium = {column: ["a.png", "b.png"] if column == "frames" else name}
        rows.append({"id": str(number), "caption": f"row {number}"} | medium | case.columns)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


_GOOD = Case("good", "", b"")


@pytest.mark.parametrize(
    ("column", "medium", "cases"), [("audio", "sound", SOUNDS), ("video", "clip", CLIPS), ("frames", "clip", FRAMES)]
)
def test_bad_media_are_set_aside_and_good_ones_are_kept(
    column: str, medium: str, cases: list[Case], tmp_path: Path
) -> None:
    path = write_rows(tmp_path, cases, column)
    found = ingest_sources([Source(str(path))], PathArguments(), PLAN, tmp_path)
    rows = [
        row for part in found.parts for row in read_part(part, ["captions", "image", "seconds", "moments"]).to_pylist()
    ]
    kept = {row["captions"][0]: row for row in rows}
    reasons: dict[str, list[str]] = {}
    for fault in found.faults:
        reasons.setdefault(fault["where"], []).append(fault["reason"])
    wrong = [] if found.notes["second_file"] == sum("and a second" in case.kind for case in cases) else ["notes"]
    for at, case in enumerate(cases):
        number, place = 2 * at + 1, f"line {2 * at + 2}"
        got = reasons.pop(place, [])
        if not (set(got) <= set(case.reason.split()) and bool(got) == bool(case.reason)):
            wrong.append((case.kind, case.reason, [f for f in found.faults if f["where"] == place]))
        if (f"row {number}" in kept) != case.stays:
            wrong.append((case.kind, "kept" if case.stays else "set aside"))
    assert not wrong, "\n".join(map(str, wrong))
    assert not reasons
    assert {f"row {number}" for number in range(0, 2 * len(cases) + 1, 2)} <= set(kept)
    for row in rows:
        content = row["image"]["bytes"]
        samples, rate = read_wav(content) if medium == "sound" else read_avi(content)
        assert row["seconds"] == pytest.approx(len(samples) / rate)
        assert all(0 <= a < b <= row["seconds"] for a, b in (moment["span"] for moment in row["moments"] or []))
