"""The classifier on a trained model, and its loss for any micro-batch and number of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from mm_utils import distributed
from mm_utils.finetuning.arguments import ClassifierArguments
from mm_utils.finetuning.classifier import build_classifier
from mm_utils.finetuning.objective import ClassificationObjective
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification, FusionDualEncoderModel
from mm_utils.model.row_noise import RowDropout
from tests.kit.objectives import step_in_parts, tiny_model
from tests.kit.processes import run_on_ranks

CLASSES = ["no", "perhaps", "yes"]
ROWS = 7
LABELS = torch.tensor([0, 1, 2, 2, 0, 1, 2, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(1).float().save_pretrained(path)
    return str(path)


def build(folder: str, inputs: str | None = None, *, texts: bool = True, **flags: Any) -> Any:
    torch.manual_seed(1)
    args = ClassifierArguments(folder, classifier_inputs=inputs, **{"classifier_dropout": 0.0, **flags})
    return build_classifier(args, CLASSES, has_texts=texts)


def whole_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = [9, 9, 6, 6, 4, 3, 3]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator),
        "input_ids": torch.randint(5, 50, (ROWS, 9), generator=generator) * mask,
        "attention_mask": mask.long(),
        "ids": torch.arange(2 * ROWS).view(ROWS, 2),
        "rows": torch.tensor([5, 0, 7, 3, 1, 6, 2]),
        "lengths": lengths,
    }


def reference(model: FusionDualEncoderForClassification, batch: dict[str, Any]) -> Tensor:
    """torch's own mean over the whole batch."""
    logits = model(batch["input_ids"], batch["pixel_values"], batch["attention_mask"]).logits
    return F.cross_entropy(logits, LABELS[batch["rows"]])


@pytest.mark.parametrize("inputs", ["fused", "pair", "image"])
def test_loads_from_the_base_class_and_saves_as_a_stock_artefact(folder: str, inputs: str, tmp_path: Path) -> None:
    model = build(folder, inputs).eval()
    base = FusionDualEncoderModel.from_pretrained(folder)
    kept = {name: value for name, value in model.state_dict().items() if not name.startswith("classifier.")}
    parts = {"vision_model", "visual_projection", "logit_scale"}
    assert {name for name in base.state_dict() if inputs != "image" or name.split(".")[0] in parts} == kept.keys()
    for name, value in kept.items():
        assert torch.equal(value, base.state_dict()[name]), name
    loaded = FusionDualEncoderForClassification.from_pretrained(
        folder, classifier_inputs=inputs, num_labels=3, output_loading_info=True
    )
    direct, info = loaded
    assert all(name.startswith("classifier.") for name in info["missing_keys"])
    assert not info["unexpected_keys"]
    assert torch.equal(direct.classifier[0].weight, torch.ones_like(direct.classifier[0].weight))
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert again.config.id2label == dict(enumerate(CLASSES))
    batch = whole_batch()
    given = {
        "pixel_values": batch["pixel_values"],
        "input_ids": batch["input_ids"] if inputs != "image" else None,
        "attention_mask": batch["attention_mask"],
    }
    with torch.no_grad():
        found = again(**given, labels=LABELS[:ROWS])
        expected = model.classify(**given)
    torch.testing.assert_close(found.logits, expected)
    torch.testing.assert_close(found.loss, F.cross_entropy(expected, LABELS[:ROWS]))
    assert (AutoConfig.from_pretrained(tmp_path).auto_map or {}).keys() >= {"AutoModelForSequenceClassification"}
    encoders = AutoModel.from_pretrained(tmp_path)  # alone
    if inputs == "image":
        alone = "a classifier of images.* Give the model that it started from|a classifier of images alone.* Take the model"
        for reads_texts in (lambda: load_model(str(tmp_path)), lambda: encoders.encode(texts="a cat")):
            with pytest.raises(ValueError, match=alone):
                reads_texts()
        assert build(str(tmp_path), texts=False).text_model is None  # it may be trained on


def test_classifier_inputs_depend_on_the_data_and_the_model(folder: str, tmp_path: Path) -> None:
    assert build(folder).config.classifier_inputs == "fused"
    assert build(folder, texts=False).config.classifier_inputs == "image"
    tiny_model(0).float().save_pretrained(tmp_path)
    assert build(str(tmp_path)).config.classifier_inputs == "pair"
    with pytest.raises(ValueError, match=r"--classifier_inputs is fused; the model has no fusion head"):
        build(str(tmp_path), "fused")
    with pytest.raises(ValueError, match=r"--classifier_inputs is pair; the data has no texts"):
        build(folder, "pair", texts=False)
    with pytest.raises(ValueError, match=r"pixel_values is missing; classifier_inputs is 'fused'"):
        build(folder).classify(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_unused_parts_are_not_trained(folder: str) -> None:
    def trained(**given):
        named = build(folder, **given).named_parameters()
        return {name.partition(".")[0] for name, parameter in named if parameter.requires_grad}

    towers = {"vision_model", "text_model"}
    assert trained() == towers | {"fusion", "classifier"}
    assert trained(inputs="pair") == towers | {"visual_projection", "text_projection", "classifier"}
    assert trained(inputs="image") == {"vision_model", "visual_projection", "classifier"}
    assert trained(freeze_text=True) == {"vision_model", "fusion", "classifier"}


@pytest.mark.parametrize("inputs", ["fused", "pair", "image"])
@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_the_loss_is_torchs_mean_for_any_micro_batch(folder: str, inputs: str, micro_batch_size: int | None) -> None:
    batch = whole_batch()
    batch["pixel_values"] = batch["pixel_values"].double()
    model = build(folder, inputs).double()
    expected = reference(model, batch)
    expected.backward()
    right = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    objective = ClassificationObjective(build(folder, inputs).double(), LABELS)
    found = step_in_parts(objective, batch, micro_batch_size)
    assert found["report"]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert 0 <= found["report"]["train_accuracy"] <= 1
    for name, gradient in found["gradients"].items():
        wanted = torch.zeros_like(gradient) if right[name] is None else right[name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def on_this_rank(folder: str) -> list[dict[str, Any]]:
    results = []
    for sizes, micro_batch_size in (([4, 3], None), ([7, 0], 2)):
        low = sum(sizes[: distributed.rank()])
        objective = ClassificationObjective(build(folder, classifier_dropout=0.5), LABELS)
        part = {name: value[low : low + sizes[distributed.rank()]] for name, value in whole_batch().items()}
        found = step_in_parts(objective, part, micro_batch_size)
        if micro_batch_size is None:
            distributed.average_gradients(objective.parameters())
            found["gradients"] = {
                name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in objective.named_parameters()
            }
        results.append(found)
    return results


def test_two_ranks_do_what_one_does(folder: str) -> None:
    objective = ClassificationObjective(build(folder, classifier_dropout=0.5), LABELS)
    assert any(isinstance(module, RowDropout) for module in objective.modules())
    alone = step_in_parts(objective, whole_batch(), None)
    largest = max(gradient.abs().max().item() for gradient in alone["gradients"].values())
    for found in (found for results in run_on_ranks(2, on_this_rank, folder) for found in results):
        assert found["report"] == pytest.approx(alone["report"], rel=1e-5)
        for name, gradient in alone["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6 * largest)
