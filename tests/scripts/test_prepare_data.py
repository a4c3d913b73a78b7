"""From raw files to a data set that pretrain takes: whole runs in process, damaged results, and real photographs."""

import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk
from PIL import Image

from mm_utils.data.arguments import DataArguments
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.pairs import load_pairs
from mm_utils.data.prepare import ingest
from mm_utils.data.prepare.on_disk import open_prepared
from mm_utils.files import replace_folder
from mm_utils.model.processor import cached_tokenizer
from mm_utils.objectives.grounding.regions import RegionReader
from mm_utils.objectives.negatives import Negatives
from scripts.prepare_data import main
from tests.kit.fault_images import draw
from tests.kit.jsonl import write_lines
from tests.kit.reading import digests, intact_rows, report_of


def write_source(folder: Path, count: int = 40, first: int = 0, **values: Any) -> Path:
    """`pairs.jsonl` and its images, without splits."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(first, first + count):
        draw(seed, (110, 90)).save(folder / f"{seed}.jpg", quality=95)
        rows.append({"image": f"{seed}.jpg", "captions": [f"picture {seed}", f"number {seed}"], **values})
    return Path(write_lines(folder / "pairs.jsonl", rows))


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    source = write_source(tmp_path / "raw")
    output = str(tmp_path / "out")
    return ["--sources", str(source), "--output_dir", output, "--image_size", "48", "--num_proc", "1"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    main(["--sources", str(write_source(folder / "raw")), "--output_dir", str(folder / "out"), "--num_proc", "1"])
    return folder / "out"


def test_every_row_comes_out_in_its_size(flags: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert main([*flags, "--validation_fraction", "0.25"]).keys() == {"train_images", "validation_images"}
    assert f"--dataset_name {flags[3]}" in caplog.text
    rows = [row for split in load_from_disk(flags[3]).values() for row in split]
    assert sorted(row["id"] for row in rows) == sorted(f"{seed}.jpg" for seed in range(40))
    assert {min(row["width"], row["height"]) for row in rows} == {round(1.15 * 48)}
    report = report_of(Path(flags[3]))
    assert (report["format"], report["sources"][0]["format"]) == ("tandem-pairs", "jsonl")
    assert "40 images" in Path(flags[3], "report.md").read_text()
    assert not Path(flags[3] + ".partial").exists()


def test_groups_that_no_share_divides_and_files_that_are_one_image_are_said(
    flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**json.loads(row), "site": "A"} for row in Path(flags[1]).read_text().splitlines()]
    rows[7]["site"] = None
    shutil.copy(tmp_path / "raw/0.jpg", tmp_path / "raw/1.jpg")
    Path(flags[1]).write_text("\n".join(map(json.dumps, rows)))
    with caplog.at_level("INFO"):
        main(["--sources", f"{flags[1]},group_column=site", *flags[2:], "--validation_fraction", "0.01"])
        load_pairs(DataArguments(dataset_name=flags[3]))
    for said in (
        "1 rows of pairs.jsonl have no value in its group_column",
        "1 row was merged into an earlier one whose file is the very same, though names and captions differ, such as 1.jpg and 0.jpg",
        "no validation split, and training will hold out 7 images of train; the rows are in 2 groups of equal images or of group_column",
        "rows of one group may now be in train and held out",
    ):
        assert said in caplog.text


def test_what_a_failed_preparation_leaves_is_named_or_removed(
    flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    work = Path(flags[3] + ".partial")
    with pytest.raises(ValueError, match="nowhere"):
        main(["--sources", str(work.parent / "nowhere.jsonl"), *flags[2:]])
    assert not work.exists()
    with pytest.raises(ValueError, match="rows"):
        main([*flags, "--min_image_side", "1000"])
    assert work.is_dir()
    assert f"{work} keeps the rows that were read: the same command resumes there" in caplog.text


def test_the_result_is_the_same_each_time(flags: list[str]) -> None:
    main(flags)
    first = digests(flags[3])
    with pytest.raises(ValueError, match="holds a prepared data set"):
        main(flags)
    shutil.rmtree(flags[3])
    main([*flags, "--num_proc", "2"])
    assert digests(flags[3]) == first


def test_a_table_that_grows_is_prepared_over_its_set_and_known_images_keep_their_splits(
    flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def splits():
        return {row["id"]: name for name, rows in load_from_disk(flags[3]).items() for row in rows}

    main([*flags, "--overwrite", "--test_fraction", "0.2"])  # the first time there is none
    first = splits()
    rows = write_source(tmp_path / "raw", 120).read_text().splitlines()
    rows[5] = rows[5].replace('"captions": ["', '"captions": ["changed ')
    Path(flags[1]).write_text("\n".join(rows[3:]))
    assert set(first.values()) == {"train", "validation", "test"}
    with caplog.at_level("INFO"):
        main([*flags, "--overwrite", "--validation_fraction", "0.5"])  # other shares: of the new images alone
    assert {name: split for name, split in splits().items() if name in first}.items() <= first.items()
    counts = {"rows": 40, "new": 80, "gone": 3, "kept": 37, "changed": 1, "moved": 0}
    assert report_of(Path(flags[3]))["overwritten"] == counts
    assert "80 are new, 3 gone, 37 kept" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"raw", "out"}


OTHERS = {
    "a prepared set": ([], [], r"prepared data set\. --overwrite replaces it"),
    "a file of somebody": (["--overwrite"], ["notes.txt"], "also holds notes.txt, which no preparation wrote"),
    "negatives": (["--overwrite"], ["negatives.json"], "also holds negatives.json"),
    "no prepared set": (["--overwrite"], [], "not empty, and holds no prepared data set"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_nothing_but_what_a_preparation_wrote_is_overwritten(
    case: str, flags: list[str], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, files, problem = OTHERS[case]
    output = Path(shutil.copytree(saved, flags[3]))
    for name in files:
        (output / name).write_text("mine")
    if case == "no prepared set":
        (output / "report.json").unlink()
    monkeypatch.setattr(ingest, "ingest_rows", lambda *_: pytest.fail("rows were read"))
    before = digests(flags[3])
    with pytest.raises(ValueError, match=problem):
        main([*flags, *more])
    assert digests(flags[3]) == before


def test_a_set_that_is_opened_while_it_is_overwritten_is_the_old_one_or_the_new_one(
    saved: Path, tmp_path: Path
) -> None:
    output = shutil.copytree(saved, tmp_path / "out")
    ends = threading.Event()
    sources = [saved, shutil.copytree(saved, tmp_path / "other")]
    for split in ("train", "validation"):
        state = sources[1] / split / "state.json"
        shard = json.loads(state.read_text())["_data_files"][0]["filename"]
        (sources[1] / split / shard).rename(sources[1] / split / "renamed.arrow")
        state.write_text(
            state.read_text().replace(shard, "renamed.arrow").replace('"_fingerprint": "', '"_fingerprint": "other')
        )

    def overwrite():
        for number in range(200):
            replace_folder(shutil.copytree(sources[number % 2], tmp_path / "new"), output)
        ends.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    seen = Counter[bool]()
    while not ends.is_set():
        pairs = open_prepared(str(output), "the set")
        kinds = {rows._fingerprint.startswith("other") for rows in pairs.values()}
        assert len(kinds) == 1
        seen[kinds.pop()] += 1
    thread.join()
    assert set(seen) == {True, False}


def test_an_output_that_is_a_link_is_followed_and_a_mount_point_is_refused_before_the_work(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk/there").mkdir(parents=True)
    Path(flags[3]).symlink_to(tmp_path / "disk/there")
    main(flags)
    assert Path(flags[3]).is_symlink()
    assert (tmp_path / "disk/there/report.json").is_file()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["there"]
    monkeypatch.setattr(ingest, "ingest_rows", lambda *_: pytest.fail("rows were read"))
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "disk/there")
        with pytest.raises(ValueError, match=r"^--output_dir is \.; that is the current folder"):
            main([*flags[:3], ".", *flags[4:]])
    monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(tmp_path / "disk/there"))
    with pytest.raises(ValueError, match=r"^--output_dir is [^;]*/out; that is a mount point"):
        main(flags)


def test_no_secret_and_no_folder_of_the_machine_is_published(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mytokenvalue99")
    source = write_source(tmp_path / "mytokenvalue99")
    secrets = ["UrlPassw0rdSecret", "deadbeefcafe0123", "ghp_abcdefghijklmnop1234", "mytokenvalue99"]
    rows = [
        {"image": f"https://b.example/k.jpg?X-Amz-Signature={secrets[1]}", "captions": ["a signed thing"]},
        *[{"image": f"https://usr:{secrets[0]}@h.example/x.jpg", "captions": ["a remote thing"]}] * 6,
        {"image": "nowhere.jpg", "captions": ["a missing thing"]},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + source.read_text())
    main(["--sources", f"{source},name={secrets[2]}", *flags[2:], "--max_bad_fraction", "0.9"])
    pushed = [path for path in Path(flags[3]).rglob("*") if path.is_file() and path.name != "quarantine.jsonl"]
    assert {"README.md", "report.md", "report.json", "state.json"} <= {path.name for path in pushed}
    for path in pushed:
        assert [each for each in [*secrets, str(tmp_path)] if each.encode() in path.read_bytes()] == [], path
    assert intact_rows(flags[3]) == 40


STATE = "train/state.json"
NAMES = "dataset_dict.json"
REPORT = "report.json"
SHARD = "train/data-00000-of-00001.arrow"
DAMAGED = {
    **{f"{name} is {text!r}": (name, text) for name in (STATE, NAMES) for text in ("", "[]", "\udcff")},
    "an empty report": (REPORT, ""),
    "a nested state": (STATE, "[" * 100_000),
    "no state of a split": (STATE, None),
    "a lost shard": (SHARD, None),
    "a shard of something else": (SHARD, "rows" * 1000),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_set_is_one_line_with_the_remedy(how: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    name, content = DAMAGED[how]
    (folder / name).unlink()  # whose inode may be mapped
    if content is not None:
        (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        load_pairs(DataArguments(dataset_name=str(folder)))
    assert str(folder) in str(caught.value)


def test_a_folder_whose_name_is_not_text(tmp_path: Path) -> None:
    odd = tmp_path / "odd\udcff"
    output = str(tmp_path / "out")
    main([f"--sources={write_source(odd)}", f"--output_dir={output}", "--num_proc", "1"])
    assert intact_rows(output) == 40


def test_what_is_corrected_and_prepared_again_is_trained_on(tmp_path: Path) -> None:
    """Boxes and phrases too: the same images and captions must not find the tokens of the old set."""
    output = str(tmp_path / "out")
    tokenizer = cached_tokenizer(["picture number", "a red door", "wrong words"], 300)
    one = [0, 0, 10, 10]
    other = [30, 30, 20, 20]
    named = ((one, "wrong words"), (other, "wrong words"), (one, "a red door"))
    regions = [{"box": box, "phrase": phrase} for box, phrase in named]
    read = []
    for region in regions:
        source = write_source(tmp_path / "raw", 12, regions=[region])
        main(["--sources", str(source), "--output_dir", output, "--num_proc", "1", "--validation_fraction", "0"])
        pairs = load_pairs(DataArguments(dataset_name=output))
        rows = tokenize_splits(pairs, tokenizer, 64, readers=[RegionReader(), Negatives()])["train"]
        row = rows.select([0]).remove_columns("image")
        read.append(json.dumps({name: row[name][:] for name in row.column_names if name != "regions"}, default=str))
        shutil.rmtree(output)
    assert len(set(read)) == len(regions)


# -- real captioned photographs, in the folder that TANDEM_REAL_DATA names --------------------------------------------
DATA = Path(os.environ.get("TANDEM_REAL_DATA", "no such folder"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="TANDEM_REAL_DATA is not set")


@needs_data
@pytest.mark.parametrize(
    ("name", "captions", "near", "bad"),
    [
        ("aerial_en", 5, 0, 0),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("photos_en", 1, 2, 0), ("photos_vi", 5, 1, 2))),
    ],
)
def test_every_good_row_is_loaded_and_preparing_finds_what_is_known(name, captions, near, bad, tmp_path):
    """The leaks are real, and were looked at; the bad rows have a full stop as their only caption."""
    source = DATA / name / "captions.jsonl"
    output = tmp_path / "out"
    pairs = load_pairs(DataArguments(train_file=str(source)), need_train=False)  # a run would leave leaks out of train
    assert set(pairs) == {"train", "validation", "test"}
    assert max(len(row["captions"]) for row in pairs["validation"].select_columns("captions")) >= captions
    main(["--sources", str(source), "--output_dir", str(output), "--on_leakage", "keep"])
    report = json.loads((output / "report.json").read_text())
    assert report["leakage"]["near"] == near
    found = {reason: part["count"] for reason, part in report["quarantined"].items()}
    assert found == ({"caption_empty": bad} if bad else {})
    left = len(source.read_text().splitlines()) - bad - report["duplicates"]["merged_rows"]
    assert sum(part["images"] for part in report["splits"].values()) == left == sum(map(len, pairs.values()))


@needs_data
def test_planted_leaks_are_all_found_and_nothing_else_is(tmp_path):
    """60 training photographs come again in test: the same file, compressed anew, at half size, brighter, in grey."""
    lines = (DATA / "photos_en/captions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if json.loads(line)["split"] == "train"][:300]
    planted = []
    for place, row in enumerate(rows):
        row["image"] = str(DATA / "photos_en" / row["image"])
        if place % 5 == 0:
            image = Image.open(row["image"]).convert("RGB")
            changed = [
                image,
                image.resize((image.width // 2, image.height // 2)),
                image.point(lambda value: min(255, round(1.15 * value))),
                image.convert("L").convert("RGB"),
            ][place // 5 % 4]
            changed.save(tmp_path / f"{place}.jpg", quality=60)
            planted.append({"id": f"copy-{place}", "image": f"{place}.jpg", "captions": ["again"], "split": "test"})
    sources = []
    for name, part in (("train", rows), ("test", planted)):
        sources.append(write_lines(tmp_path / f"{name}.jsonl", part))
    flags = ["--sources", *sources, "--allow_outside_root", "--output_dir", str(tmp_path / "out")]
    main([*flags, "--on_leakage", "drop"])
    quarantine = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    dropped = {json.loads(line)["raw"] for line in quarantine if json.loads(line)["reason"] == "leaked"}
    assert dropped == {f"train.jsonl/{row['id']}" for row in rows[::5]}
