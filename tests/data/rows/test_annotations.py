"""Annotation files give one record an image or line, and name what belongs to nothing."""

import json
from pathlib import Path

import pytest

from tests.kit.reading import read, reasons, write


def test_coco_is_joined_by_image_id_and_the_rest_is_named(folder: Path) -> None:
    images = [
        {"id": 5, "file_name": "a.jpg"},
        {"id": 3, "file_name": "b.jpg"},
        {"id": 5, "file_name": "c.jpg"},
        {"id": 4, "file_name": "absent.jpg"},
        {"file_name": "c.jpg"},
        [],
    ]
    annotations = [
        *({"image_id": 9, "caption": "nobody's"}, {"image_id": 5, "caption": "one"}, {"image_id": 4, "caption": "x"}),
        *({"image_id": 5, "caption": "two"}, {"caption": "lost"}, {"image_id": 3}),
    ]
    path = write(folder / "p.json", json.dumps({"annotations": annotations, "images": images}))
    good, bad = read(path)
    assert [(record.id, record.captions, record.where) for record in good] == [("5", ["one", "two"], "image 0")]
    assert reasons(bad) == [
        ("annotation 4", "missing_column"),
        ("annotation 5", "missing_column"),
        ("image 1", "unmatched_image"),
        ("image 2", "duplicate_id"),
        ("image 3", "image_missing"),
        ("image 4", "missing_column"),
        ("image 5", "not_an_object"),
        ("annotation 0", "unmatched_caption"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"images": [], "annotations": [{"image_id": 1, "bbox": []}]}', "no annotation has image_id and caption"),
        ('{"images": {}, "annotations": []}', "it has no list 'images'"),
        ('{"images": [', "it is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "it has no list 'images'"),
    ],
)
def test_a_document_that_is_no_coco_file_is_an_error(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(write(folder / "p.json", text), format="coco")
    assert "\n" not in str(error.value)


def test_karpathy_gives_all_sentences_their_split_and_their_folder(folder: Path) -> None:
    (folder / "val2014").mkdir()
    (folder / "c.jpg").rename(folder / "val2014" / "c.jpg")
    images = [
        {"filename": "a.jpg", "imgid": 7, "split": "test", "sentences": [{"raw": "one"}, {"raw": "two"}]},
        {"filename": "c.jpg", "filepath": "val2014", "cocoid": 12, "split": "restval", "sentences": [{"raw": "c"}]},
        {"filename": "b.jpg", "split": "challenge", "sentences": [{"raw": "b"}]},
        {"filename": "b.jpg", "split": "val", "sentences": []},
        {"filename": "b.jpg", "split": "val", "sentences": [{"tokens": []}]},
    ]
    good, bad = read(write(folder / "p.json", json.dumps({"images": images})))
    assert [(record.id, record.captions, record.split) for record in good] == [
        ("7", ["one", "two"], "test"),
        ("12", ["c"], "train"),
    ]
    assert reasons(bad) == [
        ("image 2", "unknown_split"),
        ("image 3", "unmatched_image"),
        ("image 4", "missing_column"),
    ]


def test_flickr_captions_may_hold_commas_and_quotes(folder: Path) -> None:
    text = 'image,caption\na.jpg,A dog, a cat and "a bird" .\nb.jpg,"Two ""big"" dogs, running"\nno comma\n'
    good, bad = read(write(folder / "captions.txt", text))
    assert [record.captions[0] for record in good] == ['A dog, a cat and "a bird" .', 'Two "big" dogs, running']
    assert reasons(bad) == [("line 4", "malformed_row")]
    tokens = "a.jpg#0\tone\na.jpg#1\ttwo\nabsent.jpg.1#0\tx\nb.jpg\tno number\n"
    good, bad = read(write(folder / "Flickr8k.token.txt", tokens))
    assert [(record.id, record.captions) for record in good] == [("a.jpg", ["one"]), ("a.jpg", ["two"])]
    assert reasons(bad) == [("line 3", "image_missing"), ("line 4", "malformed_row")]
