"""What is reckoned of a step is what it asks for."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState

from benchmarks import expected
from mm_utils.extras.flops.counts import measure_flops
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor


@pytest.fixture
def own_precision() -> Iterator[None]:
    """What is expected is of bf16; other tests of this process have theirs."""
    state = AcceleratorState._shared_state
    kept = dict(state)
    state.clear()
    yield
    state.clear()
    state.update(kept)


@pytest.mark.usefixtures("own_precision")
def test_a_step_is_reckoned_from_its_operations() -> None:
    sizes = {"vision_config": "small", "text_config": "small", "image_size": 64, "vocab_size": 100}
    args = expected.ExpectedArguments(launch_us=1e6)  # which bounds the time
    rows = expected.of_step(args, ModelArguments(**sizes), [32, 64])  # type: ignore[arg-type]
    model_args = ModelArguments(**sizes)  # type: ignore[arg-type]
    model = build_model(model_args, load_processor(model_args, ["two green stars"] * 20).tokenizer)
    lengths = expected.captions(64, 100)["lengths"]
    assert rows[1]["TFLOP"] * 1e12 == pytest.approx(measure_flops(model, 64, 40).training_step(64, lengths), rel=0.25)
    assert rows[0]["launches"] == rows[1]["launches"] > 500
    weights = 4 * sum(weight.numel() for weight in model.parameters()) / 2**30
    growth = rows[1]["peak GiB"] - rows[0]["peak GiB"]
    assert growth > 0
    assert rows[0]["peak GiB"] - growth == pytest.approx(4 * weights, rel=0.3)  # with gradients and moments
    assert rows[0]["ms"] == 1e3 * rows[0]["launches"]


def test_the_loss_is_products_of_fp32() -> None:
    """Six products of N x N and the width, four where all is one tile."""
    args = expected.ExpectedArguments()
    for pairs, products in ((1024, 4), (32768, 6)):
        row = expected.of_loss(args, pairs, 64)
        assert row["TFLOP"] == pytest.approx(products * 2 * pairs**2 * 64 / 1e12, rel=0.01)
        assert row["peak GiB"] < 1.5
