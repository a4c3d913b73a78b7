"""The path jail; `tests.faults.test_data` has every kind of bad path in a data file."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Jail, Limits, is_url, read_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`root/inside.png` and `root/sub/deep.png`; beside it `secret.png`, and links that lead in and out."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    for path in (root / "inside.png", root / "sub" / "deep.png", tmp_path / "secret.png"):
        path.write_bytes(path.name.encode())
    (root / "link_in.png").symlink_to("sub/deep.png")
    (root / "link_out.png").symlink_to(tmp_path / "secret.png")
    (root / "folder_out").symlink_to(tmp_path)
    (root / "folder_in").symlink_to("sub")
    (root / "loop.png").symlink_to("loop.png")
    (root / "dangling.png").symlink_to("nowhere.png")
    os.mkfifo(root / "pipe.png")
    return root


def reason(jail: Jail, name: str) -> str:
    with pytest.raises(Fault) as fault:
        jail.resolve(name)
    return fault.value.reason


@pytest.mark.parametrize(
    "name", ["inside.png", "./sub/../inside.png", "sub/deep.png", "link_in.png", "folder_in/deep.png"]
)
def test_files_below_the_root_are_found(root: Path, name: str) -> None:
    path = Jail(str(root)).resolve(name)
    assert os.path.isabs(path)
    assert Path(path).read_bytes() == Path(root / name).read_bytes()
    assert Jail(str(root)).resolve(str(root / name)) == path


OUTSIDE = ["../secret.png", "sub/../../secret.png", "link_out.png", "folder_out/secret.png", "{outside}/secret.png"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_root_may_be_left_when_that_is_allowed(root: Path, name: str) -> None:
    path = Jail(str(root), allow_outside=True).resolve(name.format(outside=root.parent))
    assert Path(path).read_bytes() == b"secret.png"


def test_a_folder_whose_name_begins_like_the_root_is_outside(root: Path) -> None:
    (root.parent / "rooted").mkdir()
    (root.parent / "rooted" / "a.png").write_bytes(b"x")
    assert reason(Jail(str(root)), "../rooted/a.png") == "outside_root"


def test_a_root_may_be_a_link(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    jail = Jail(str(root.parent / "alias"))
    assert jail.resolve("inside.png") == str(root.parent / "alias" / "inside.png")
    assert jail.resolve(str(root / "inside.png")) == str(root / "inside.png")


def test_a_name_that_is_not_utf8_works(root: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    (root / name).write_bytes(b"x")
    assert os.fsencode(Jail(str(root)).resolve(name)).endswith(b"caf\xe9.png")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from(["..", ".", "sub", "inside.png", "deep.png", "secret.png", "folder_out", "folder_in", "root"]),
        min_size=1,
        max_size=7,
    ),
    absolute=st.booleans(),
)
def test_a_resolved_path_lies_below_the_root(root: Path, parts: list[str], absolute: bool) -> None:
    name = "/".join(parts)
    refused, path = "", ""
    try:
        path = Jail(str(root)).resolve(f"{root.parent}/{name}" if absolute else name)
    except Fault as fault:
        refused = fault.reason
    assert refused in ("", "outside_root", "image_missing", "not_a_file")
    assert refused or os.path.realpath(path).startswith(os.path.realpath(root) + os.sep)
    assert refused or os.path.isfile(path)


def test_addresses_are_no_paths() -> None:
    for name in (
        "http://a.b/c.png",
        "HTTPS://a.b",
        "file:///etc/passwd",
        "s3://b/k",
        "zip://a.png::b.zip",
        "pipe:cat a",
    ):
        assert is_url(name), name
    for name in ("a.png", "a:b.png", "C:/x.png", "dir/http://x", "n0:1.png"):
        assert not is_url(name), name


# Reading
def test_a_file_or_a_part_of_it_is_read(root: Path) -> None:
    path = str(root / "inside.png")
    assert read_file(path, Limits()) == b"inside.png"
    assert read_file(path, Limits(), 2, 4) == b"side"


def failure(path: Path, limits: Limits, *part: int) -> str:
    with pytest.raises(Fault) as fault:
        read_file(str(path), limits, *part)
    return fault.value.reason


def test_a_file_that_cannot_be_read_is_a_fault(root: Path) -> None:
    (root / "empty.png").touch()
    assert failure(root / "empty.png", Limits()) == "image_empty"
    assert failure(root / "absent.png", Limits()) == "image_missing"
    assert failure(root / "pipe.png", Limits()) == "not_a_file"
    assert failure(root / "sub", Limits()) == "not_a_file"
    assert failure(root / "inside.png", Limits(max_bytes=9)) == "too_many_bytes"
    assert failure(root / "inside.png", Limits(), 5, 10) == "read_error"


def test_an_error_of_the_network_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.open, []

    def flaky(path: str, *args: int) -> int:
        calls.append(path)
        if len(calls) < 3:
            raise OSError(116, "Stale file handle")
        return real(path, *args)

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("os.open", flaky)
    assert read_file(str(root / "inside.png"), Limits(attempts=3)) == b"inside.png"
    calls.clear()
    assert failure(root / "inside.png", Limits(attempts=2)) == "read_error"
