import json

import pytest
import torch
from torchvision.io import write_jpeg
from transformers import BertConfig, BertModel, BertTokenizerFast, MobileNetV2Config, MobileNetV2Model
from transformers.models.mobilenet_v2 import MobileNetV2ImageProcessor

from benchmarks.rivals import plain_contrastive
from benchmarks.rivals.judging import caption_relevance, retrieval_metrics


def test_metrics_agree_with_sorting():
    torch.manual_seed(0)
    images, a_caption = 30, 5
    owner = torch.arange(images).repeat_interleave(a_caption)
    scores = torch.rand(images, images * a_caption, dtype=torch.float64)
    metrics = retrieval_metrics(scores, torch.arange(images)[:, None] == owner)
    for k in (1, 5, 10):
        hits = [bool((owner[scores[i].argsort(descending=True)[:k]] == i).any()) for i in range(images)]
        assert metrics[f"image_to_text_R@{k}"] == pytest.approx(sum(hits) / images)
        hits = [bool((scores[:, j].argsort(descending=True)[:k] == i).any()) for j, i in enumerate(owner)]
        assert metrics[f"text_to_image_R@{k}"] == pytest.approx(sum(hits) / len(owner))


def test_perfect_and_collapsed_models():
    owner = torch.arange(12).repeat_interleave(5)
    relevant = torch.arange(12)[:, None] == owner
    perfect = relevant.double()
    assert set(retrieval_metrics(perfect, relevant).values()) == {1.0}
    assert set(retrieval_metrics(torch.ones_like(perfect), relevant).values()) == {0.0}
    with pytest.raises(ValueError, match="finite"):
        retrieval_metrics(perfect * float("nan"), relevant)


def test_shared_captions():
    by_owner, by_text = caption_relevance([["a", "b"], ["a"], ["c"]])
    assert by_owner.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert by_text.int().tolist() == [[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    # a model that knows the texts perfectly: only the plain figures lose the tie of the two captions "a"
    plain, same_text = (retrieval_metrics(by_text.double(), table) for table in (by_owner, by_text))
    assert (plain["text_to_image_R@1"], plain["image_to_text_R@1"]) == (pytest.approx(2 / 4), pytest.approx(1 / 3))
    assert set(same_text.values()) == {1.0}


@pytest.fixture
def tiny(tmp_path):
    """Tiny untrained encoders and a data file of random images; returns the arguments that name them."""
    vision, text = str(tmp_path / "vision"), str(tmp_path / "text")
    MobileNetV2Model(MobileNetV2Config(image_size=32, depth_multiplier=0.25)).save_pretrained(vision)
    MobileNetV2ImageProcessor().save_pretrained(vision)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(text)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertModel(config).save_pretrained(text)
    rows = []
    for index in range(14):
        write_jpeg(torch.randint(0, 255, (3, 40, 48), dtype=torch.uint8), str(tmp_path / f"{index}.jpg"))
        split = "train" if index < 8 else "validation"
        rows.append({"id": str(index), "image": f"{index}.jpg", "captions": ["a b", "c d"], "split": split})
    data = tmp_path / "captions.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    return [
        *("--train_file", str(data), "--validation_file", str(data), "--per_device_train_batch_size", "4"),
        *("--vision_model_name_or_path", vision, "--text_model_name_or_path", text, "--max_seq_length", "8"),
        *("--json_out", str(tmp_path / "out.json"), "--output_dir", str(tmp_path / "model")),
    ]


def test_whole_command(tiny, tmp_path):
    result = plain_contrastive.main([*tiny, "--max_steps", "3"])
    assert (result["steps"], result["pairs_seen"], result["epochs"]) == (3, 12, 0.75)
    assert (result["images"], result["captions"], result["distinct_captions"]) == (6, 12, 2)
    # both captions are shared by all six images, so the best right one always ties with five wrong ones
    assert (result["image_to_text_R@5"], result["image_to_text_R@10"]) == (0, 1)
    assert result["same_text_image_to_text_R@1"] == result["same_text_text_to_image_R@10"] == 1
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert (tmp_path / "model" / "config.json").exists()


def test_probe_sets_the_schedule(tiny):
    result = plain_contrastive.main([*tiny, "--train_minutes", "0.01"])
    assert result["probe_seconds_per_step"] > 0
    assert 1 <= result["steps"] <= result["planned_steps"]
