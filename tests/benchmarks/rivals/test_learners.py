"""The rates of the loops, the clock, the judge's recall, and ridge regression."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.rivals.closed_forms import choose_penalty, regress
from benchmarks.rivals.judging import Clock, Judge, half_widths, hits_of, judge_now, mean_of, recalls
from benchmarks.rivals.learners import RECIPES, Watch
from mm_utils.extras.starts.closed_form import Features


def test_rates_rise_and_fall():
    linear, cosine = RECIPES["transformers"], RECIPES["tuned"]
    assert linear.rate(0) == 1
    assert linear.rate(0.25) == 0.75
    assert linear.rate(1.2) == cosine.rate(1.2) == 0
    assert cosine.rate(0) < 0.02
    assert cosine.rate(0.5) == pytest.approx(0.5)


def test_the_watch_leaves_evaluations_out_and_ends_the_run():
    control = SimpleNamespace(should_training_stop=False)
    watch = Watch(Clock(torch.device("cpu")), budget=0.1)
    watch.on_evaluate_begin(None, None, control)
    time.sleep(0.2)
    watch.on_evaluate(None, None, control, metrics={"eval_mean_recall": 0.5})
    watch.on_step_end(None, None, control)
    assert watch.points == [[pytest.approx(0, abs=0.05), 0.5]]
    assert not control.should_training_stop
    time.sleep(0.1)
    watch.on_step_end(None, None, control)
    assert control.should_training_stop


def test_the_mean_leaves_padding_out():
    states, mask = torch.tensor([[[1.0], [3.0], [50.0]]]), torch.tensor([[1, 1, 0]])
    assert mean_of(states, mask).tolist() == [[2.0]]


def test_a_model_is_judged_as_it_will_be_used_and_goes_on_being_trained():
    model, seen = torch.nn.Dropout(), []
    judge_now(model, None, lambda towers: seen.append(model.training))
    assert seen == [False]
    assert model.training


def test_recall_by_hand():
    image_ME = torch.eye(12)
    relevant_MT = torch.eye(12, dtype=torch.bool)
    assert recalls(image_ME, 3 * image_ME, relevant_MT)["mean_recall"] == 1
    found = recalls(image_ME, image_ME.roll(1, 0), relevant_MT)  # ties count against
    assert found["text_to_image_R@1"] == found["image_to_text_R@10"] == 0


def test_intervals_are_those_of_drawing_images_anew():
    generator = torch.Generator().manual_seed(0)
    own_MT = torch.eye(60).repeat_interleave(3, 1).bool()
    skill_M1 = torch.randn(60, 1, generator=generator)  # makes captions of one image alike
    score_MT = torch.randn(60, 180, generator=generator) + own_MT * (3 + 2 * skill_M1)
    hits_M = own_MT[score_MT.argmax(0), torch.arange(180)].view(60, 3).double().mean(1)
    drawn = hits_M[torch.randint(60, (4000, 60), generator=generator)].mean(1)
    hits = hits_of(score_MT, own_MT)
    found = half_widths(hits, own_MT)
    assert found["text_to_image_R@1"] == pytest.approx(1.96 * float(drawn.std()), rel=0.05)
    one = float(hits["image_to_text_R@1"].mean())
    assert found["image_to_text_R@1"] == pytest.approx(1.959964 * (one * (1 - one) / 59) ** 0.5)


def test_the_best_on_validation_is_kept():
    judge = Judge.__new__(Judge)
    judge.found = [
        {"seconds": seconds, "validation": {"mean_recall": recall}, "test": {"mean_recall": 1 - recall}}
        for seconds, recall in ((1.0, 0.1), (2.0, 0.4), (3.0, 0.3))
    ]
    found = judge.result()
    assert (found["seconds"], found["test"]["mean_recall"]) == (2.0, 0.6)
    assert found["points"] == [[1.0, 0.1], [2.0, 0.4], [3.0, 0.3]]


def test_ridge_is_that_of_the_normal_equations():
    torch.manual_seed(0)
    image, text = torch.randn(40, 5).double(), torch.randn(60, 4).double()
    owner = torch.cat([torch.arange(40), torch.arange(20)]).sort().values
    features = Features(image, text, owner)
    embedded, other = regress(features, 0.3)(image, text)
    x, y = image[owner] - image[owner].mean(0), text - text.mean(0)
    penalty = 0.3 * (x**2).mean() * len(x)
    weights = torch.linalg.lstsq(
        torch.cat([x, penalty.sqrt() * torch.eye(5).double()]), torch.cat([y, torch.zeros(5, 4).double()])
    ).solution
    torch.testing.assert_close(embedded[:, :4], F.normalize((image - image[owner].mean(0)) @ weights, dim=-1))
    torch.testing.assert_close(other[:, :4], F.normalize(y, dim=-1))


def test_the_penalty_is_chosen_by_pairs_left_out():
    torch.manual_seed(0)
    text = torch.randn(80, 6).double()
    noise = torch.randn(80, 30).double()
    owner = torch.arange(80)
    easy = Features(torch.cat([text, noise * 1e-3], 1), text, owner)
    hard = Features(torch.cat([text, noise], 1), text, owner)
    assert choose_penalty(easy) <= choose_penalty(hard)
    embed = regress(easy, choose_penalty(easy))
    assert recalls(*embed(easy.image_MA, text), torch.eye(80, dtype=torch.bool))["text_to_image_R@1"] == 1
