"""The bare loop trains the same model on the same batch, and the table has every setting."""

import pytest
import torch

from benchmarks import gpu
from mm_utils.model.build import ModelArguments

SIZES = {"vision_config": "tiny", "text_config": "tiny", "image_size": 32, "vocab_size": 100}


def test_both_loops_begin_with_the_same_loss():
    accelerator, losses = gpu.make_accelerator(), []
    for loop in ("tandem", "bare"):
        setting = {"loop": loop, "objectives": "contrastive", "pairs": 12, "compiled": False}
        step, operations = gpu.make_step(accelerator, setting, ModelArguments(**SIZES), None)
        found = step(0)
        losses.append(float(found["loss"] if loop == "tandem" else found))
        assert operations > 1e6
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_captions_come_longest_first_and_pad_with_zeros():
    batch = gpu.captions(50, 100)
    assert batch["lengths"] == sorted(batch["lengths"], reverse=True)
    assert torch.equal(batch["attention_mask"].sum(1), torch.tensor(batch["lengths"]))
    assert torch.equal(batch["input_ids"] > 0, batch["attention_mask"].bool())


@pytest.mark.slow
def test_a_short_run(tmp_path):
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    file = tmp_path / "gpu.json"
    rows = gpu.main(
        [*flags, "--pairs", "8", "--compiled", "false", "--rounds", "1", "--steps", "1", "--output_file", str(file)]
    )
    assert [(row["loop"], row["objectives"]) for row in rows] == [
        ("tandem", "contrastive"), ("bare", "contrastive"), ("tandem", "contrastive,captioning")
    ]  # fmt: skip
    assert file.with_suffix(".md").read_text().count("| tandem |") == 2
