"""The arithmetic of many GPUs: what must hold of it whatever the hardware is taken to reach."""

import pytest

from benchmarks.processes import scaling
from benchmarks.processes.scaling import ScalingArguments, reckon
from mm_utils.extras.flops.counts import FlopCounts, Quadratic

LARGE = FlopCounts(35 * 10**9, 0, Quadratic(0, 2 * 10**8, 0), Quadratic(0, 0, 0), True, True)


def at(gpus: int, batch: int, **flags: float) -> dict[str, object]:
    return reckon(gpus, batch, LARGE, 2 * 10**8, 512, 0.0, ScalingArguments(**flags))  # type: ignore[arg-type]


def test_a_step_is_the_sum_of_its_parts() -> None:
    row = at(64, 32768)
    assert row["step"] == pytest.approx(sum(row[name] for name in ("towers", "gather", "loss", "gradients")))  # type: ignore
    assert row["towers"] == pytest.approx(512 * 3 * (35e9 + 32 * 2e8) / 300e12)
    assert row["all gradients"] == pytest.approx(2 * 63 / 64 * 8e8 / 50e9)
    assert row["gather"] == pytest.approx(63 * (16 + 512 * (8 * 512 + 16 + 12)) / 50e9)
    rate = 32768 / row["step"]  # type: ignore[operator]
    args = ScalingArguments()
    cores, read = rate / args.images_per_core, rate * args.kb_per_pair / 1e6
    around = [row[name] for name in ("pairs_per_second", "cores", "cores_of_gpu", "read")]
    assert around == pytest.approx([rate, cores, cores / 64, read])


def test_gradients_hide_behind_the_towers_until_these_are_too_short() -> None:
    assert at(64, 32768)["gradients"] == 0
    few = at(1024, 32768)
    assert few["gradients"] == pytest.approx(few["all gradients"] - 2 / 3 * few["towers"])  # type: ignore[operator]
    assert str(few["first"]).startswith("gradients, ")
    assert at(1024, 32768, bandwidth_gb=500.0)["first"] == "nothing"


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--vision_config", "tiny", "--text_config", "tiny", "--vocab_size", "300", "--projection_dim", "64"]
    rows = scaling.main([*flags, "--gpus", "4,64", "--global_batch", "32,512", "--pairs", "100000"])
    assert [(row["batch"], row["gpus"]) for row in rows] == [(32, 4), (512, 4), (512, 64)]
    assert 0 < rows[0]["order"] < 1
    printed = capsys.readouterr().out
    assert printed.count("| 64 | 512 | ") == 2
    assert "100,000 pairs" in printed
