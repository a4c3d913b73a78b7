"""The bare loop trains the same model on the same batch, and the table has every setting."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.host_reads import HostReads
from mm_utils.copies import HostCopy
from mm_utils.model.build import ModelArguments
from mm_utils.objectives.joint import JointObjective
from mm_utils.training.step import TrainStep

SIZES = {"vision_config": "tiny", "text_config": "tiny", "image_size": 32, "vocab_size": 100}


def test_all_loops_begin_with_the_same_loss_and_learn_at_one_rate():
    accelerator, losses = gpu.make_accelerator(), []
    for loop in ("tandem", "bare"):
        setting = {"loop": loop, "objectives": "contrastive", "pairs": 12, "compiled": False}
        step, operations = gpu.make_step(accelerator, setting, ModelArguments(**SIZES), None)
        found = [step(number) for number in range(4)]
        losses.append([float(each if loop == "bare" else each["loss"]) for each in found])
        assert operations > 1e6
    (first, *_, last), (bare, *_, of_bare) = losses
    assert bare == pytest.approx(first, abs=1e-5)
    assert of_bare == pytest.approx(last, abs=0.02)


class ReadLate(TrainStep):
    """As on a GPU: with fused AdamW, and figures that are read in the next step."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.reads_late = True
        for group in self.optimizer.param_groups:
            group["fused"] = True


@pytest.mark.parametrize("parts", [None, "6"])
@pytest.mark.parametrize("objectives", ["contrastive", "contrastive,captioning", "contrastive,matching"])
def test_a_step_waits_for_nothing(objectives, parts, monkeypatch):
    """A read would drain a GPU's queue; a change that adds one must be seen here."""
    monkeypatch.setattr(gpu, "TrainStep", ReadLate)
    setting = {"loop": "tandem", "objectives": objectives, "pairs": 12, "compiled": False}
    step, _ = gpu.make_step(gpu.make_accelerator(), setting, ModelArguments(**SIZES), parts)
    step(10**6 - 2)  # of the head's part of the run, where there is one
    with HostReads() as reads:
        step(10**6 - 1)
    assert reads.found == {}
    assert reads.kernels > 400


def test_reads_are_counted_where_they_are():
    values = torch.arange(6.0)
    with HostReads() as reads:
        HostCopy(values).tolist()
        assert values[values > 1].unique().sum().item() > 0
        values.tolist()
    assert reads.found == {"elsewhere": 4}
    assert reads.kernels == 4  # >, index, unique, sum


def test_a_setting_that_does_not_fit_is_a_row(tmp_path, monkeypatch):
    """The table has what was measured before it and after it, and is on the disk when a later setting ends the program."""
    encode = JointObjective.encode

    def encode_few(self, batch, *args, **named):
        if len(batch["ids"]) == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if len(batch["ids"]) == 24:
            raise KeyboardInterrupt
        return encode(self, batch, *args, **named)

    monkeypatch.setattr(JointObjective, "encode", encode_few)
    file, flags = tmp_path / "gpu.json", [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    flags += ["--objectives_tried", "contrastive", "--compiled", "false", "--rounds", "1", "--steps", "1"]
    flags += ["--profiled", "false"]
    monkeypatch.setattr(gpu, "ceilings", lambda device: {"flops": 1e12, "bytes": 1e10})
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*flags, "--loops", "tandem", "--pairs", "8,16,12,24", "--output_file", str(file)])
    rows = json.loads(file.read_text())["results"]
    assert [("error" in row, row["pairs"]) for row in rows] == [(False, 8), (True, 16), (False, 12)]
    assert "memory ran out with 16 pairs" in file.with_suffix(".md").read_text()

    def no_handle(*_: Any) -> None:
        raise RuntimeError(failure)

    monkeypatch.setattr(gpu, "bare_step", no_handle)
    flags += ["--loops", "bare", "--pairs", "8"]
    failure = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert [row["error"] for row in gpu.main(flags)] == [failure]
    failure = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu.main(flags)


def test_annotations_are_not_counted_as_busy(monkeypatch):
    """A span that torch writes around kernels lasts as long as they do together."""

    def event(key: str, annotation: bool) -> SimpleNamespace:
        device = SimpleNamespace(name="CUDA")
        return SimpleNamespace(
            key=key, device_type=device, self_device_time_total=3000.0, count=1, is_user_annotation=annotation
        )

    class Events(list):
        def table(self, **_: Any) -> str:
            return ""

    events = Events([event("nvjet_gemm", False), event("Optimizer.step#AdamW.step", True)])
    monkeypatch.setattr(torch.profiler.profile, "key_averages", lambda _: events)
    figures = gpu.profile(lambda _: None, torch.device("cpu"), 2.0)
    assert (figures["busy"], figures["products"]) == (0.5, 1.0)


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
