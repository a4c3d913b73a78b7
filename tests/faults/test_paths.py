"""Paths and addresses that lead to the wrong place, or to none: no row reaches what lies outside of the data."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datasets import Dataset

from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from scripts.prepare_data import main
from tests.data.prepare.zoo import line
from tests.kit.fault_images import draw, png
from tests.kit.numbered_rows import loaders, new_tokenizer
from tests.kit.recording_server import RecordingServer, recording


@pytest.mark.parametrize(("written", "stored"), [("Caf\u00e9.png", "Cafe\u0301.png"), ("photo.PNG", "photo.png")])
def test_a_name_in_another_form_is_no_match_and_gets_a_hint(
    written: str, stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / stored).write_bytes(png(draw(0)))
    with pytest.raises(ValueError, match=r"line 1: .*there is .*which differs in (case|Unicode form)"):
        main(["--sources", str(write(tmp_path, [written])), "--output_dir", str(tmp_path / "out"), "--num_proc", "1"])


def write(folder: Path, images: list[str]) -> Path:
    """A file of rows."""
    rows = [line(image=image, caption=f"picture {number}") for number, image in enumerate(images)]
    (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "pairs.jsonl"


# -- the network --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RecordingServer]:
    with recording(png(draw(0))) as server:
        yield server


@pytest.mark.parametrize("allowed", [False, True], ids=["by default", "with downloads"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1"])
def test_no_row_makes_this_machine_ask_its_own_network(
    host: str, allowed: bool, server: RecordingServer, tmp_path: Path
) -> None:
    address = f"http://{host}:{server.server_address[1]}/metadata"
    flags = ["--output_dir", str(tmp_path / "out"), "--num_proc", "1", *(["--allow_download"] if allowed else [])]
    with pytest.raises(ValueError, match="private_address" if allowed else "url_not_allowed"):
        main(["--sources", str(write(tmp_path, [address])), *flags])
    assert server.asked == []


def test_training_asks_no_server(server: RecordingServer, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{server.server_address[1]}/a.png"
    good = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(good):
        (tmp_path / name).write_bytes(png(draw(number)))
    file = write(tmp_path, [*good, address])
    pairs = load_pairs(DataArguments(train_file=str(file)))
    tokenized = tokenize_splits(pairs, new_tokenizer(), 16)
    keys = [
        key for rows in tokenized.values() for batch in loaders().evaluation(rows, 4) for key in batch["image_ids"]
    ]
    assert sorted(keys) == good
    cells = [{"bytes": None, "path": name} for name in [*good, address]]
    table = Dataset.from_dict({"image": cells, "caption": [f"picture {at}" for at in range(5)]})
    table.to_parquet(tmp_path / "pairs.parquet")
    pairs = load_pairs(DataArguments(train_file=str(tmp_path / "pairs.parquet")))
    assert sum(map(len, pairs.values())) == 4
    assert server.asked == []


# -- files that change after they were found ----------------------------------------------------------------------------


CHANGES: dict[str, Callable[[Path], object]] = {
    "it is gone": lambda path: None,
    "it is a pipe": os.mkfifo,
    "it is a folder": os.mkdir,
    "it is an endless device": lambda path: path.symlink_to("/dev/zero"),
    "it is empty": lambda path: path.write_bytes(b""),
    "it is cut in half": lambda path: path.write_bytes(png(draw(3))[:300]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_training_is_named_and_the_run_goes_on(change: str, tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(6)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(png(draw(number)))
    arguments = DataArguments(train_file=str(write(tmp_path, names)), validation_file=str(write(tmp_path, names)))
    rows = tokenize_splits(load_pairs(arguments), new_tokenizer(), 16)["train"]
    (tmp_path / "3.png").unlink()
    CHANGES[change](tmp_path / "3.png")
    [batch] = loaders().evaluation(rows, 6)
    assert batch["image_ids"] == [name for name in names if name != "3.png"]
    [reason] = batch["skipped"]
    assert "3.png" in str(reason)
