"""Flags and items that name sources are parsed, and impossible ones refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from mm_utils.data.prepare.arguments import parse_source
from mm_utils.data.rows.source import DataArguments, PathArguments


def test_an_item_is_parsed() -> None:
    source = parse_source(r"coco/captions\, all.json,image_root=coco/train2017,split=val,templates=a {}.|{}")
    assert (source.path, source.name) == ("coco/captions, all.json", "captions, all.json")
    assert (source.image_root, source.split) == ("coco/train2017", "validation")
    assert source.templates == ("a {}.", "{}")
    assert pickle.loads(pickle.dumps(source)) == source


BAD_ITEMS = [
    ("p.jsonl,spilt=val", r"has the key spilt; known are .*Did you mean 'split'"),
    ("p.jsonl,split=nowhere", "split=nowhere; a split is train, validation or test"),
    ("p.jsonl,format=jsnl", "format=jsnl; known are .*Did you mean 'jsonl'"),
    ("p.jsonl,split", "'split' is not key=value"),
    ("p.jsonl,split=val,split=test", "split is given twice"),
    ("p.jsonl,path=q.jsonl", "path is given twice"),
    ("p,templates=a photo", "templates=a photo; a template says"),
    (",split=val", "an item without a path"),
]


@pytest.mark.parametrize(("item", "message"), BAD_ITEMS, ids=str)
def test_an_item_that_cannot_be_meant_is_refused(item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_source(item)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given_args", "message"),
    [
        ({"dataset_name": "a", "train_file": "b"}, r"--dataset_name and --train_file are given together"),
        ({"dataset_name": "a", "validation_file": "b"}, r"--dataset_name and --validation_file are given together"),
        ({"max_train_samples": 0}, r"--max_train_samples is 0; it counts from 1"),
    ],
)
def test_contradictory_arguments_are_refused(given_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataArguments(**given_args)


def test_an_image_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert PathArguments(image_root=str(tmp_path)).allow_outside_root is False
    with pytest.raises(ValueError, match=r"--image_root is absent; there is no such folder"):
        PathArguments(image_root="absent")
