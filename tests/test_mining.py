"""Negatives are what a plain loop over all captions finds; nothing of another split is among them."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from mm_utils.data.arguments import DataArguments, MiningArguments
from mm_utils.data.batches.tokens import caption_key, image_key
from mm_utils.data.pairs import load_pairs
from mm_utils.evaluation import embeddings
from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.mining import REASONS, Mined, choose
from scripts import mine_negatives, prepare_data
from tests.kit.fault_images import draw
from tests.kit.reading import intact_rows

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
    none = torch.zeros(len(owner), 2, 1, dtype=torch.long)
    return Embeddings(image_ME, text_TE, keys, keys[owner], torch.tensor(order), none), rows


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


def test_the_script_adds_a_column_that_may_be_mined_again(pretrained: str, tmp_path: Path, caplog) -> None:
    """Thirty images, of which the last two look alike, in three splits: no negative is true, or of another split."""
    rows = []
    for number in range(30):
        draw(min(number, 28), (110, 90)).save(tmp_path / f"{number}.jpg", quality=95 - 20 * (number == 29))
        split = "train" if number < 20 or number > 27 else "validation" if number < 24 else "test"
        captions = [f"picture {number}", f"a {split} image, number {number}", "an image"][: 2 + number % 2]
        rows.append({"image": f"{number}.jpg", "captions": captions, "split": split})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--image_size", "32", "--num_proc", "1"]
    prepare_data.main(["--sources", str(tmp_path / "pairs.jsonl"), "--output_dir", str(tmp_path / "data"), *words])

    def mine(data: str, output: str) -> datasets.DatasetDict:
        names = ["--model_name_or_path", pretrained, "--dataset_name", str(tmp_path / data)]
        rest = ["--dataloader_num_workers", "0", "--relative_margin", "0", "--num_candidates", "12"]
        mine_negatives.main([*names, "--output_dir", str(tmp_path / output), *rest])
        return datasets.load_from_disk(str(tmp_path / output))

    new, old = mine("data", "mined"), datasets.load_from_disk(str(tmp_path / "data"))
    assert f"--dataset_name {tmp_path / 'mined'} --objectives contrastive:1,matching:1" in caplog.text
    for split, kept in old.items():
        assert new[split].remove_columns("negatives").data.equals(kept.data)
        assert any(new[split]["negatives"]) == (split == "train")
    assert intact_rows(tmp_path / "mined") == 30
    assert load_pairs(DataArguments(dataset_name=str(tmp_path / "mined")))["train"].column_names[-1] == "negatives"
    assert old["train"]._fingerprint != new["train"]._fingerprint
    texts = {caption for captions in new["train"]["captions"] for caption in captions}
    alike = {"picture 28", "picture 29"}
    for row in new["train"]:
        assert set(row["negatives"]) <= texts - set(row["captions"])
        assert len(set(row["negatives"])) == len(row["negatives"]) <= 5
        assert not (alike & set(row["captions"]) and alike & set(row["negatives"]))
    assert mine("mined", "again")["train"].data.equals(new["train"].data)
    with pytest.raises(ValueError, match="it exists"):
        mine("data", "again")
    with pytest.raises(ValueError, match="it was not prepared"):
        mine(pretrained, "new")
