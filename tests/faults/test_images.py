"""Image files that are broken or hostile, as training meets them: named, and refused before they fill the memory."""

import errno
import os
import resource
from pathlib import Path

import pytest
from PIL import Image

from mm_utils.data.images import open_image, read_pixels
from mm_utils.model.reading import UnreadableError
from tests.kit.fault_images import UNDECODABLE, Broken, draw, png
from tests.kit.tiny_run import alone


@pytest.mark.parametrize("case", UNDECODABLE, ids=lambda case: case.kind)
def test_a_broken_file_is_named_when_training_meets_it(case: Broken, tmp_path: Path) -> None:
    path = tmp_path / "this one.jpg"
    path.write_bytes(case.make(draw(1)))
    with pytest.raises(UnreadableError, match="this one") as caught:
        read_pixels({"bytes": None, "path": str(path)}, 64)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnreadableError):
        read_pixels({"bytes": path.read_bytes(), "path": None}, 64)


BOMB_SIDES = (6_400, 9_000, 13_300)


def measured(paths: list[Path]) -> list[int]:
    """Kilobytes by which the greatest memory of this process grew until each file was refused."""
    found = []
    for path in paths:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(UnreadableError):
            open_image({"bytes": None, "path": str(path)}, 224)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return found


def test_a_file_that_unpacks_to_gigabytes_is_refused_before_it_does(tmp_path: Path) -> None:
    """In a process of its own, whose greatest memory tells."""
    paths = []
    for side in BOMB_SIDES:
        paths.append(tmp_path / f"{side}.png")
        Image.new("1", (side, side), 1).save(paths[-1])
    _, found = alone(measured, paths)
    assert all(kilobytes < 20_000 for kilobytes in found)


def test_a_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnreadableError, match=r"large\.png: it has 1,099,511,627,776 bytes"):
        open_image({"bytes": None, "path": str(path)})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 64 << 20  # kilobytes


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_network_disk_that_falters_is_asked_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "good.png"
    path.write_bytes(png(draw(4)))
    failures, really = [OSError(code, "falters")], os.open

    def falter(name: str, *rest: int, **more: int) -> int:
        if failures and str(name) == str(path):
            raise failures.pop()
        return really(name, *rest, **more)

    monkeypatch.setattr("mm_utils.files.os.open", falter)
    assert open_image({"bytes": None, "path": str(path)}).size == (64, 48)
    assert not failures
