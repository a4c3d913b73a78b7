"""Formats of other data sets are recognised, and yield the same pairs; lists and folders are joined by key."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_utils.data.rows.source import Source
from tests.kit.reading import (
    NAMES,
    PAIRS,
    TEXTS,
    check_closed,
    check_format,
    check_linked,
    joined,
    lines,
    put,
    read,
    write,
)

COCO = {
    "info": {},
    "images": [{"id": at, "file_name": name} for at, name in enumerate(NAMES)],
    "annotations": [{"id": 9 - at, "image_id": at, "caption": text} for at, text in enumerate(TEXTS)][::-1],
}
KARPATHY = [{"filename": name, "sentences": [{"raw": text}], "split": "train"} for name, text in PAIRS]


def two_lists(folder: Path) -> Source:
    write(folder / "images.txt", lines(*NAMES))
    write(folder / "captions.txt", lines(*(f"{name[0]}\t{text}" for name, text in reversed(PAIRS))))
    return Source(str(folder / "images.txt"), captions=str(folder / "captions.txt"))


def two_folders(folder: Path) -> Path:
    for name, text in PAIRS:
        write(folder / "set" / "captions" / name.replace("jpg", "txt"), text)
        (folder / "set" / "images").mkdir(exist_ok=True)
        (folder / name).rename(folder / "set" / "images" / name)
    return folder / "set"


FILES = [  # their names, what is in them, and the format
    ("captions_train2017.json", json.dumps(COCO), "coco"),
    ("dataset_coco.json", json.dumps({"images": KARPATHY, "dataset": "coco"}), "karpathy"),
    ("results.token", joined("#0\t"), "flickr"),
    ("captions.txt", joined(",", "image,caption"), "flickr"),
    ("results.csv", joined("| 0| ", "image_name| comment_number| comment"), "flickr"),
]


@pytest.mark.parametrize(("name", "text", "expected"), FILES)
def test_every_file_is_recognised_and_gives_the_same_pairs(name: str, text: str, expected: str, folder: Path) -> None:
    check_format(folder, write(folder / name, text), expected)


@pytest.mark.parametrize("make", [two_lists, two_folders])
def test_two_lists_or_folders_are_recognised(make: Callable[[Path], Path | Source], folder: Path) -> None:
    check_format(folder, make(folder), "parallel")


LISTS = put("images/0.png", "images/dog/1.png", "captions/0.txt", "captions/dog/1.txt")


def test_a_folder_that_cannot_be_listed_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_closed(LISTS, "parallel", tmp_path / "set", monkeypatch, count=2)


def test_a_linked_folder_is_a_bad_row(tmp_path: Path) -> None:
    check_linked(LISTS, "parallel", tmp_path, count=2)


KEYS = st.lists(st.text("abcdef0123._-", min_size=1, max_size=6), unique=True, max_size=8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(images=KEYS, captions=KEYS, repeat=st.integers(1, 2), seed=st.integers(0, 2**16))
def test_parallel_lists_are_joined_by_key_whatever_their_order(
    folder: Path, images: list[str], captions: list[str], repeat: int, seed: int
) -> None:
    shuffle = random.Random(seed).shuffle
    shuffle(images)
    said = [(key, f"{number} of {key}") for key in captions for number in range(repeat)]
    shuffle(said)
    write(folder / "i.txt", lines(*(f"{key}\ta.jpg" for key in images)))
    write(folder / "c.txt", lines(*(f"{key}\t{text}" for key, text in said)))
    good, bad = read(folder / "i.txt", captions=str(folder / "c.txt"))
    joined = [[text for key, text in said if key == image] for image in images if image in captions]
    assert [record.captions for record in good] == joined
    counts = {
        reason: sum(row.fault.reason == reason for row in bad) for reason in ("unmatched_image", "unmatched_caption")
    }
    assert counts["unmatched_image"] == len(set(images) - set(captions))
    assert counts["unmatched_caption"] == repeat * len(set(captions) - set(images))
    assert len(good) + len(bad) == len(images) + counts["unmatched_caption"]


def test_a_parallel_source_needs_both_sides(folder: Path) -> None:
    with pytest.raises(ValueError, match="where are its captions"):
        read(folder, format="parallel")
    with pytest.raises(ValueError, match=r"there is no file or folder .*absent"):
        read(folder, captions=str(folder / "absent"))


def put_names(folder: Path, *names: str) -> None:
    for name in names:
        write(folder / name, name)


def test_rows_of_qvhighlights_are_moments_of_videos(tmp_path: Path) -> None:
    put_names(tmp_path, "videos/abc_0.0_150.0.mkv")
    row = {"qid": 1, "query": "a cat", "duration": 150, "vid": "abc_0.0_150.0", "relevant_windows": [[2, 8], [10, 14]]}
    [record], _ = read(write(tmp_path / "rows.jsonl", lines(row)), image_root=str(tmp_path / "videos"))
    assert (record.medium, record.id, record.captions) == ("clip", "abc_0.0_150.0", ["a cat"])
    assert record.moments == [{"span": [2, 8], "phrase": "a cat"}, {"span": [10, 14], "phrase": "a cat"}]


def test_the_list_of_esc50_is_read_as_it_comes(tmp_path: Path) -> None:
    put_names(tmp_path, "audio/1-100-A-0.wav", "audio/5-200-A-11.wav")
    (tmp_path / "meta").mkdir()
    text = "filename,fold,target,category,esc10\n1-100-A-0.wav,1,0,dog,True\n5-200-A-11.wav,5,11,sea_waves,True\n"
    (tmp_path / "meta/esc50.csv").write_text(text)
    (first, second), _ = read(tmp_path / "meta/esc50.csv")
    assert (first.medium, first.split, first.captions[0]) == ("sound", "train", "the sound of a dog.")
    assert (second.split, second.captions[0]) == ("test", "the sound of a sea waves.")


def test_formats_of_images_alone_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(ValueError, match="coco is read for images alone, and the medium is sound"):
        read(tmp_path / "a.json", medium="sound")
