"""What an earlier version wrote still opens: a prepared set, a model folder, a search index.

`tests/kit/old/8b0f1f5.tar.xz` was written by that commit's `prepare_data`, `pretrain` (4 steps), `embed` and
`search`, from 24 drawings of 32 pixels; what they found then is what is expected now.
"""

import tarfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import VisionTextDualEncoderModel

from mm_utils.data.arguments import DataArguments
from mm_utils.data.pairs import load_pairs
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from scripts import search
from tests.kit.jsonl import read_lines

OLD = sorted((Path(__file__).parent / "kit/old").glob("*.tar.xz"))


@pytest.fixture(scope="module", params=OLD, ids=lambda path: path.name.partition(".")[0])
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(request.param) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # of Python 3.11.4 and later
        archive.extractall(folder)
    return folder


def test_a_prepared_set(old: Path) -> None:
    pairs = load_pairs(DataArguments(dataset_name=str(old / "prepared")))
    given = read_lines(old / "pairs.jsonl")
    for split, rows in pairs.items():
        expected = sorted(row["caption"] for row in given if row["split"] == split)
        assert sorted(rows["captions"]) == expected


def test_a_model_and_an_index(old: Path) -> None:
    """Our model and the stock class embed photographs as the index has them, which itself is made anew."""
    index = datasets.load_from_disk(str(old / "index")).with_format("numpy")
    images = [Image.open(old / "photos" / Path(path).name).convert("RGB") for path in index["path"]]
    stored = np.stack(index["embedding"]).astype(np.float32)
    processor = load_processor_of(str(old / "run"))
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        ours = load_model(str(old / "run")).eval().encode(images)
        stock = VisionTextDualEncoderModel.from_pretrained(old / "run/dual_encoder").eval().get_image_features(pixels)
    stock = getattr(stock, "pooler_output", stock)
    for found in (ours, stock / stock.norm(dim=1, keepdim=True)):
        np.testing.assert_allclose(np.asarray(found), stored, atol=2e-3)
    place = ["--index_dir", str(old / "index"), "--model_name_or_path", str(old / "run")]
    with pytest.raises(ValueError, match=r"an earlier version wrote"):
        search.main([*place, "--json", "--query", "a red circle"])
