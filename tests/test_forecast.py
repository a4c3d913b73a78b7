"""Forecasts are in proportion to what was measured, and exact where nothing had to be extrapolated."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.forecast import Measured, Step, forecast_disk, forecast_memory, forecast_time
from mm_utils.training_arguments import TrainingArguments

MEASURED = Measured(
    sampled={"train": 100, "validation": 10},
    total={"train": 1000, "validation": 50},
    steps=[Step(8, 9.0, 1e9), Step(8, 1.0, 1e9), Step(32, 2.0, 1.6e9)],
    processes=1,
    micro_batch_size=None,
    images_per_second=1000.0,
    workers=2,
    evaluation_seconds=2.0,
    checkpoint_seconds=3.0,
    finish_seconds=7.0,
    checkpoint_bytes=10**9,
    model_bytes=4 * 10**8,
    token_bytes=110,
    feature_bytes=1000,
)


def arguments(**changed) -> TrainingArguments:
    return TrainingArguments(**{"global_batch_size": 32, "max_steps": 100, "save_steps": 0, **changed})


@given(st.integers(1, 10**6), st.floats(1e-3, 1e3))
def test_training_takes_steps_times_the_seconds_of_a_step(steps, seconds):
    measured = replace(MEASURED, steps=[Step(32, seconds, 1e9)], images_per_second=1e9)
    found = forecast_time(arguments(max_steps=steps), measured)
    assert found["steps"] == steps
    assert found["training_hours"] * 3600 == pytest.approx(steps * seconds)
    assert found["hours"] == pytest.approx(sum(found[f"{n}_hours"] for n in ("training", "evaluation", "checkpoint")))


def test_a_step_that_was_not_measured_is_in_proportion_to_its_pairs():
    small, large = (forecast_time(arguments(global_batch_size=size), MEASURED) for size in (32, 320))
    assert large["training_hours"] == pytest.approx(10 * small["training_hours"])


def test_a_schedule_of_batches_is_counted_in_pairs():
    found = forecast_time(arguments(batch_size_schedule="0:8,50:32"), MEASURED)
    assert found["training_hours"] * 3600 == pytest.approx((50 * 8 + 50 * 32) / 16)


def test_the_slower_of_model_and_loader_decides_and_without_workers_they_take_turns():
    slow = replace(MEASURED, images_per_second=4.0)
    assert forecast_time(arguments(), MEASURED)["pairs_per_second"] == 16
    assert forecast_time(arguments(), slow)["pairs_per_second"] == 4
    assert forecast_time(arguments(), replace(slow, workers=0))["pairs_per_second"] == pytest.approx(
        1 / (1 / 16 + 1 / 4)
    )


@pytest.mark.parametrize(("eval_steps", "times"), [(0, 1), (100, 1), (50, 2), (30, 4)])
def test_evaluations_are_counted_as_the_loop_does_and_grow_with_the_split(eval_steps, times):
    found = forecast_time(arguments(eval_steps=eval_steps), MEASURED)
    assert found["evaluations"] == times
    assert found["evaluation_hours"] * 3600 == pytest.approx(times * 2.0 * 5)


def test_checkpoints_take_their_time_and_at_most_the_limit_and_one_more_on_disk():
    args = arguments(save_steps=10, save_total_limit=2)
    assert forecast_time(args, MEASURED)["checkpoint_hours"] * 3600 == pytest.approx(10 * 3 + 7)
    assert forecast_disk(args, MEASURED)["checkpoints_gb"] == 3
    assert forecast_disk(arguments(save_steps=10, eval_steps=10), MEASURED)["checkpoints_gb"] == 3
    best = arguments(save_steps=10, eval_steps=10, load_best_model_at_end=True)
    assert forecast_disk(best, MEASURED)["checkpoints_gb"] == 4
    best.save_best_limit = 3
    assert forecast_disk(best, MEASURED)["checkpoints_gb"] == 6
    assert forecast_disk(arguments(save_steps=60), MEASURED)["checkpoints_gb"] == 2
    assert forecast_disk(arguments(save_steps=10, save_total_limit=None), MEASURED)["checkpoints_gb"] == 10
    assert forecast_disk(arguments(), MEASURED)["checkpoints_gb"] == 0


def test_caches_grow_with_the_rows_that_they_are_of():
    assert forecast_disk(arguments(), MEASURED)["cache_gb"] * 1e9 == pytest.approx(110 * 1050 / 110 + 1000 * 10)


def test_memory_is_a_line_through_two_sizes_that_ends_at_what_is_held_at_a_time():
    def peak(measured=MEASURED, **changed):
        return forecast_memory(arguments(**changed), measured)["peak_memory_gib"] * 2**30

    assert peak() == pytest.approx(1.6e9)
    assert peak(global_batch_size=56) == pytest.approx(2.2e9)
    assert peak(global_batch_size=64, measured=replace(MEASURED, processes=2)) == pytest.approx(2.4e9)
    assert peak(global_batch_size=10**6, measured=replace(MEASURED, micro_batch_size=32)) == pytest.approx(1.6e9)
