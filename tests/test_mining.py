"""Negatives are what a plain loop over all captions finds; nothing of another split is among them."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from mm_utils.data.batches.tokens import caption_key, image_key
from mm_utils.data.pairs import load_pairs
from mm_utils.data.prepare.arguments import verify
from mm_utils.data.rows.source import DataArguments
from mm_utils.evaluation import embeddings
from mm_utils.evaluation.embeddings import Embeddings, Texts
from mm_utils.mining import REASONS, Mined, MiningArguments, choose
from scripts import mine_negatives, prepare_data, pretrain
from tests.kit.fault_images import draw

IMAGES, WIDTH = 40, 8
ARGS = MiningArguments(num_negatives=3, num_candidates=12, relative_margin=0.1)


def drawn_split(seed: int = 0) -> tuple[Embeddings, datasets.Dataset]:
    """Random embeddings of images with one to three captions, some of which are equal, in another order than the rows."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, IMAGES)
    texts = [[f"{'A' if n % 2 else 'a'} text {rng.integers(60)}" for n in range(count)] for count in counts]
    rows = datasets.Dataset.from_dict(
        {
            "id": [str(row) for row in range(IMAGES)],
            "captions": texts,
            "caption_keys": [[caption_key(text) for text in each] for each in texts],
        }
    )
    order = rng.permutation(IMAGES)[: IMAGES - 2]  # two cannot be read
    keys = torch.tensor([image_key(str(row)) for row in order])
    image_ME, text_TE = (torch.tensor(rng.normal(size=(n, WIDTH)), dtype=torch.float) for n in (len(order), 200))
    text_TE = text_TE[: counts[order].sum()]
    owner = torch.arange(len(order)).repeat_interleave(torch.tensor(counts[order]))
    text_TE = torch.nn.functional.normalize(text_TE + 0.7 * image_ME[owner], dim=1)
    image_ME = torch.nn.functional.normalize(image_ME, dim=1)
    none = torch.zeros(len(owner), 1, dtype=torch.long)
    return Embeddings(image_ME, text_TE, keys, keys[owner], torch.tensor(order), Texts(none, none)), rows


def by_loops(split: Embeddings, rows: datasets.Dataset, group: list[int], args: MiningArguments) -> Mined:
    """The same by loops over images and captions."""
    captions = [(m, text) for m, row in enumerate(split.rows_M.tolist()) for text in rows[row]["captions"]]
    cosine_MT = (split.image_ME @ split.text_TE.T).numpy()
    found, left_out = [[] for _ in range(len(rows))], dict.fromkeys(REASONS, 0)
    for m, row in enumerate(split.rows_M.tolist()):
        own = [t for t, (owner, _) in enumerate(captions) if owner == m]
        best = max(cosine_MT[m, t] for t in own)
        others = [t for t in np.argsort(-cosine_MT[m], kind="stable") if t not in own][: args.num_candidates]
        kept = []
        for t in others:
            owner, text = captions[t]
            if text.lower() in {captions[one][1].lower() for one in own}:
                left_out["same_text"] += 1
            elif group[split.rows_M[owner]] == group[row]:
                left_out["same_image"] += 1
            elif cosine_MT[m, t] > (1 - args.relative_margin) * best:
                left_out["too_close"] += 1
            else:
                kept.append(t)
        taken = {captions[t][1].lower(): captions[t][1] for t in reversed(kept)}
        first = dict.fromkeys(captions[t][1].lower() for t in kept)
        found[row] = [taken[text] for text in first][: args.num_negatives]
    return Mined(found, left_out)


@pytest.mark.parametrize("seed", [0, 1])
def test_negatives_are_those_of_plain_loops(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split, rows = drawn_split(seed)
    group = [row // 2 * 2 for row in range(IMAGES)]
    expected = by_loops(split, rows, group, ARGS)
    found = choose(split, rows, np.array(group), ARGS)
    assert found == expected
    assert min(found.left_out.values()) > 0
    assert sum(map(len, found.negatives)) > IMAGES
    monkeypatch.setattr(embeddings, "TILE", 3 * len(split.text_TE))
    assert choose(split, rows, np.array(group), ARGS) == expected


# -- the script ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few steps."""
    folder = tmp_path_factory.mktemp("miner") / "run"
    pretrain.main([*tiny_flags, "--output_dir", str(folder)])
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images, of which the last two look alike, in three splits."""
    folder, rows = tmp_path_factory.mktemp("pairs"), []
    for number in range(30):
        draw(min(number, 28), (110, 90)).save(folder / f"{number}.jpg", quality=95 - 20 * (number == 29))
        split = "train" if number < 20 or number > 27 else "validation" if number < 24 else "test"
        captions = [f"picture {number}", f"a {split} image, number {number}", "an image"][: 2 + number % 2]
        rows.append({"image": f"{number}.jpg", "captions": captions, "split": split})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--image_size", "32", "--num_proc", "1"]
    prepare_data.main(["--sources", str(folder / "pairs.jsonl"), "--output_dir", str(folder / "data"), *words])
    return folder / "data"


def flags(model: Path, data: Path, output: Path) -> list[str]:
    names = ("--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(output))
    return [*names, "--dataloader_num_workers", "0", "--relative_margin", "0", "--num_candidates", "12"]


@pytest.fixture(scope="module")
def mined(model: Path, prepared: Path) -> Path:
    folder = prepared.parent / "mined"
    mine_negatives.main(flags(model, prepared, folder))
    return folder


def test_the_set_is_the_same_with_a_column_more(prepared: Path, mined: Path) -> None:
    old, new = (datasets.load_from_disk(str(folder)) for folder in (prepared, mined))
    assert old.keys() == new.keys() == {"train", "validation", "test"}
    for split, rows in new.items():
        assert rows.remove_columns("negatives").data.equals(old[split].data)
    assert sum(map(len, new["train"]["negatives"])) > 10
    assert not any(new["validation"]["negatives"]) and not any(new["test"]["negatives"])  # noqa: PT018
    assert verify(str(mined)) == verify(str(prepared)) == 30
    assert load_pairs(DataArguments(dataset_name=str(mined)))["train"].column_names[-1] == "negatives"
    assert old["train"]._fingerprint != new["train"]._fingerprint


def test_no_negative_is_true_or_of_another_split(mined: Path) -> None:
    train = datasets.load_from_disk(str(mined))["train"]
    texts = {caption for captions in train["captions"] for caption in captions}
    captions = {row["id"]: set(row["captions"]) for row in train}
    for row in train:
        assert set(row["negatives"]) <= texts - set(row["captions"])
        assert len(set(row["negatives"])) == len(row["negatives"]) <= 5
    alike = [name for name in captions if {"picture 28", "picture 29"} & captions[name]]
    assert len(alike) == 2
    for row in train:
        if row["id"] in alike:
            assert not set(row["negatives"]) & {"picture 28", "picture 29"}


def test_the_column_may_be_mined_again(model: Path, mined: Path, tmp_path: Path, caplog) -> None:
    mine_negatives.main(flags(model, mined, tmp_path / "again"))
    assert f"--dataset_name {tmp_path / 'again'} --objectives contrastive:1,matching:1" in caplog.text
    old, new = (datasets.load_from_disk(str(folder))["train"] for folder in (mined, tmp_path / "again"))
    assert new["negatives"][:] == old["negatives"][:]
    assert new.column_names == old.column_names


def test_folders_that_are_refused(model: Path, prepared: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it was not prepared"):
        mine_negatives.main(flags(model, corpus.parent, tmp_path / "new"))
    with pytest.raises(ValueError, match="it exists"):
        mine_negatives.main(flags(model, prepared, tmp_path))
