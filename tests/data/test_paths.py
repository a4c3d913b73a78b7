"""The path jail: what a name in a data file may reach."""

import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Jail, Limits, PathArguments, is_url, read_file


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


@pytest.mark.parametrize("name", [*OUTSIDE, "/etc/hostname", "../absent.png"])
def test_no_name_leaves_the_root(root: Path, name: str) -> None:
    assert reason(Jail(str(root)), name.format(outside=root.parent)) == "outside_root"


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_root_may_be_left_when_that_is_allowed(root: Path, name: str) -> None:
    path = Jail(str(root), allow_outside=True).resolve(name.format(outside=root.parent))
    assert Path(path).read_bytes() == b"secret.png"


def test_a_folder_whose_name_begins_like_the_root_is_outside(root: Path) -> None:
    (root.parent / "rooted").mkdir()
    (root.parent / "rooted" / "a.png").write_bytes(b"x")
    assert reason(Jail(str(root)), "../rooted/a.png") == "outside_root"


def test_a_root_that_is_a_link_holds_what_lies_in_its_place(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    jail = Jail(str(root.parent / "alias"))
    assert jail.resolve("inside.png") == str(root.parent / "alias" / "inside.png")
    assert jail.resolve(str(root / "inside.png")) == str(root / "inside.png")


BAD_NAMES = [
    ("absent.png", "image_missing"),
    ("inside.png/deeper.png", "image_missing"),
    ("dangling.png", "image_missing"),
    ("sub", "not_a_file"),
    (".", "not_a_file"),
    ("", "not_a_file"),
    ("pipe.png", "not_a_file"),
    ("loop.png", "bad_path"),
    ("in\0side.png", "bad_path"),
    ("half\ud83d.png", "bad_path"),
    ("x" * 256, "path_too_long"),
    ("ảnh" * 60 + ".png", "path_too_long"),
    ("ab/" * 3000 + "c.png", "path_too_long"),
]


@pytest.mark.parametrize(
    ("name", "expected"), BAD_NAMES, ids=lambda value: value[:12].encode("ascii", "replace").decode()
)
@pytest.mark.parametrize("allow", [False, True])
def test_a_name_that_is_no_regular_file_says_why(root: Path, name: str, expected: str, allow: bool) -> None:
    assert reason(Jail(str(root), allow), name) == expected


def test_a_device_is_not_opened() -> None:
    assert reason(Jail("/", allow_outside=True), "/dev/zero") == "not_a_file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_entered_is_named(root: Path) -> None:
    (root / "sub").chmod(0)
    try:
        assert reason(Jail(str(root)), "sub/deep.png") == "permission_denied"
    finally:
        (root / "sub").chmod(0o700)


def test_a_name_that_is_not_utf8_works(root: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    (root / name).write_bytes(b"x")
    assert os.fsencode(Jail(str(root)).resolve(name)).endswith(b"caf\xe9.png")


@pytest.mark.parametrize(
    ("there", "asked", "hint"),
    [("Dog.PNG", "dog.png", "in case"), ("caf\u00e9.png", "cafe\u0301.png", "Unicode form")],
)
def test_a_twin_is_hinted_at_and_not_taken(root: Path, there: str, asked: str, hint: str) -> None:
    (root / there).write_bytes(b"x")
    if (root / asked).exists():
        pytest.skip("this file system takes both names for one")
    with pytest.raises(Fault) as fault:
        Jail(str(root)).resolve(asked)
    assert fault.value.reason == "image_missing"
    assert hint in fault.value.detail
    assert unicodedata.normalize("NFC", there) in unicodedata.normalize("NFC", fault.value.detail)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from(["..", ".", "sub", "inside.png", "deep.png", "secret.png", "folder_out", "folder_in", "root"]),
        min_size=1,
        max_size=7,
    ),
    absolute=st.booleans(),
)
def test_what_is_resolved_lies_below_the_root(root: Path, parts: list[str], absolute: bool) -> None:
    name = "/".join(parts)
    refused, path = "", ""
    try:
        path = Jail(str(root)).resolve(f"{root.parent}/{name}" if absolute else name)
    except Fault as fault:
        refused = fault.reason
    assert refused in ("", "outside_root", "image_missing", "not_a_file")
    assert refused or os.path.realpath(path).startswith(os.path.realpath(root) + os.sep)
    assert refused or os.path.isfile(path)


def test_addresses_are_told_from_paths() -> None:
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


def test_what_cannot_be_read_is_a_fault(root: Path) -> None:
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


def test_an_image_root_that_is_no_folder_is_refused(root: Path) -> None:
    assert PathArguments(image_root=str(root)).allow_outside_root is False
    with pytest.raises(ValueError, match=r"--image_root is absent; there is no such folder"):
        PathArguments(image_root="absent")
