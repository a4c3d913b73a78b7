"""Boxes lie where they did, in what is stored of the image; `tests/data/prepare` stores whole rows, moments too."""

from typing import Any

import pytest

from mm_utils.data.faults import Fault
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.timed import stored_regions
from mm_utils.data.rows.records import BytesImage, Record

SIZES = {"width": 100, "height": 64, "original_width": 200, "original_height": 128}


def stored(regions: Any, sizes: dict[str, int] = SIZES) -> Any:
    record = Record("pairs", "line 1", None, BytesImage("a", b""), ["a caption"], regions=regions)
    return stored_regions(record, sizes, CheckArguments())[0]


def test_boxes_follow_the_image() -> None:
    regions = [{"box": [20, 30, 100, 60], "phrase": "a  corner"}]
    assert stored(regions) == [{"box": [10, 15, 50, 30], "phrase": "a corner"}]
    assert stored(regions, {}) is None


@pytest.mark.parametrize("regions", ["left", [{"box": [1, 2, 3], "phrase": "x"}], [{"box": [1, 2, 3, 4]}], [3]])
def test_regions_that_are_none(regions: Any) -> None:
    with pytest.raises(Fault, match="bad_regions"):
        stored(regions)
