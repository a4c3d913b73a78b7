"""The card of a prepared data set, which `datasets` and the Hub's client read, and its push to a stand-in for the Hub."""

import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from huggingface_hub import DatasetCard

from mm_utils.hub import DatasetHubArguments, push_data_set
from scripts.prepare_data import main
from tests.kit.corpora import write_corpus
from tests.kit.hub import HubServer


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_corpus(tmp_path_factory.mktemp("raw"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows.append({**rows[0], "image": "images/nowhere.png", "captions": ["of nobody"]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FLAGS = ("--on_leakage", "keep", "--max_bad_fraction", "1", "--num_proc", "1")


@pytest.fixture(scope="module")
def prepared(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "my pairs"
    main(["--sources", str(raw), "--output_dir", str(folder), *FLAGS, "--license", "cc-by-4.0"])
    return folder


def test_the_card_says_what_it_is_and_shows_the_report(prepared: Path) -> None:
    card = DatasetCard.load(prepared / "README.md")
    assert (card.data.license, card.data.size_categories) == ("cc-by-4.0", "n<1K")
    report = (prepared / "report.md").read_text()
    assert report.partition("\n")[2].strip() in card.text
    assert "Licence: cc-by-4.0." in card.text
    for picture in ("pairs_train.jpg",):
        assert f"({picture})" in card.text
        assert (prepared / picture).is_file()


def test_datasets_opens_the_folder_by_its_card(prepared: Path, tmp_path: Path) -> None:
    found = datasets.load_dataset(str(prepared), cache_dir=str(tmp_path))
    stored = datasets.load_from_disk(str(prepared))
    assert {name: len(rows) for name, rows in found.items()} == {name: len(rows) for name, rows in stored.items()}
    assert found["train"][0]["image"].size == (stored["train"][0]["width"], stored["train"][0]["height"])
    assert found["train"]["content_id"][:] == stored["train"]["content_id"][:]


def test_pixels_of_a_raw_store_stay_bytes(raw: Path, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    main(["--sources", str(raw), "--output_dir", str(folder), *FLAGS, "--store", "raw", "--image_size", "32"])
    found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert isinstance(found["train"][0]["image"]["bytes"], bytes)
    assert "Licence: not stated" in (folder / "README.md").read_text()


def test_a_push_sends_all_but_what_was_set_aside(
    raw: Path,
    tmp_path: Path,
    server: HubServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "my pairs"
    with caplog.at_level(logging.INFO, "mm_utils"):
        main(["--sources", str(raw), "--output_dir", str(folder), *FLAGS, "--push_to_hub"])
    files = server.repos["tester/my-pairs"]
    assert server.kinds["tester/my-pairs"] == "dataset"
    assert server.private["tester/my-pairs"]
    assert (folder / "quarantine.jsonl").read_text()
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(files) == here - {"quarantine.jsonl"}
    assert all(files[name] == (folder / name).read_bytes() for name in files)
    assert "to my-pairs, private" in caplog.text


def test_a_public_repository_of_another_name(prepared: Path, server: HubServer) -> None:
    args = DatasetHubArguments(push_to_hub=True, hub_dataset_id="team/pairs", hub_private_repo=False)
    assert push_data_set(str(prepared), args)
    assert not server.private["team/pairs"]


def test_a_push_that_fails_names_the_command_for_later(
    prepared: Path,
    server: HubServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.fail("/commit/", 403)
    assert not push_data_set(str(prepared), DatasetHubArguments(push_to_hub=True, hub_dataset_id="tester/pairs"))
    _, _, command = caplog.text.partition("push it later with: ")
    program, *words = shlex.split(command.splitlines()[0])
    assert program == "hf"
    client = [sys.executable, "-m", "huggingface_hub.cli.hf", *words]
    subprocess.run(client, check=True, capture_output=True, timeout=60)
    assert "train/data-00000-of-00001.arrow" in server.repos["tester/pairs"]
    assert "quarantine.jsonl" not in server.repos["tester/pairs"]
    assert server.private["tester/pairs"]


def test_nothing_is_sent_unless_asked(prepared: Path, server: HubServer) -> None:
    assert not push_data_set(str(prepared), DatasetHubArguments())
    assert server.requests == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"hub_dataset_id": "a/b/c"}, "--hub_dataset_id is 'a/b/c'"), ({"license": "CC BY"}, "--license is 'CC BY'; ")],
)
def test_wrong_arguments_are_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetHubArguments(**flags)  # type: ignore[arg-type]
