"""Training on several media: towers are frozen in each other's steps, and neither parts, processes nor a new start change a thing."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from mm_utils import distributed
from mm_utils.checkpointing.state import optimizer_tensors
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.extras.dry_run import dry_run
from mm_utils.extras.several_media.callbacks import SeveralMedia
from mm_utils.extras.several_media.evaluators import list_evaluators, make_evaluators
from mm_utils.extras.several_media.flags import MediaArguments
from mm_utils.extras.several_media.mixture import open_media
from mm_utils.extras.several_media.per_medium import build_media
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor, train_tokenizer
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from mm_utils.training.trainer import Trainer
from scripts import pretrain
from tests.kit.ranks import let_accelerate_find_ranks, run_on_ranks
from tests.kit.small_media import model_args, small_media

ADAM = OptimizerArguments(adam_epsilon=1e-3, learning_rate=5e-3)  # a tiny epsilon makes steps of rounding
STEPS, STOP = 6, 3
TOLERANCE = 1e-5


class Watch(TrainerCallback):
    """Keep the weights and the optimizer's state after every step, and the batches."""

    def __init__(self, trainer: list[Trainer]):
        self.trainer = trainer
        self.weights: list[dict[str, torch.Tensor]] = []
        self.moments: list[dict[str, torch.Tensor]] = []
        self.media: list[str] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        objective = self.trainer[0].accelerator.unwrap_model(self.trainer[0].objective)
        self.weights.append({name: value.clone() for name, value in kwargs["model"].state_dict().items()})
        moments = optimizer_tensors(self.trainer[0].optimizer, objective)
        self.moments.append({name: value.clone() for name, value in moments.items()})
        self.media.append(kwargs["batch"]["medium"])


def train(
    root: Path,
    folder: str,
    parts: int = 1,
    start: Path | None = None,
    objectives: str = "contrastive",
    steps: int = STEPS,
    evaluates: bool = False,
    share: str = "2,1",
) -> tuple[Watch, Trainer]:
    """What `scripts/pretrain.py` does, with watched steps."""
    let_accelerate_find_ranks()
    world = distributed.world_size()
    accelerator = make_accelerator()
    Path(root, folder).mkdir(exist_ok=True)
    args = TrainingArguments(
        output_dir=str(root / folder),
        batch_size_schedule="0:8,4:12",
        micro_batch_size=None if parts == 1 else str(8 // world // parts),
        max_steps=steps,
        save_steps=STOP,
        eval_steps=STOP if evaluates else 0,
        logging_steps=1,
        per_device_eval_batch_size=8,
    )
    towers = model_args(root)
    with small_media():
        data = open_media(
            accelerator,
            DataArguments(dataset_name="images,sounds"),
            MediaArguments(share),
            LoaderArguments(dataloader_num_workers="0"),
            args,
            lambda captions, **of_medium: load_processor(towers, captions, **of_medium),
        )
    torch.manual_seed(args.seed)
    model = build_media(towers, data.processor.tokenizer, None, list(data.media))
    objective = build_objective(model, ObjectiveArguments(objectives), args.seed, data.processor.tokenizer)
    optimizer = build_optimizer(model, ADAM, pretrained=False, device=accelerator.device)
    trainers: list[Trainer] = []
    watch = Watch(trainers)
    measures = []
    if evaluates:
        measures = list_evaluators(make_evaluators(EvaluationArguments(rerank_top_k=0), data), data, args.seed)
    callbacks = [SeveralMedia(), watch]
    trainers.append(Trainer(args, ADAM, accelerator, objective, optimizer, data, measures, callbacks))
    trainers[0].train(start)
    return watch, trainers[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def straight(root: Path) -> tuple[Watch, Trainer]:
    return train(root, "straight", evaluates=True)


def of_medium(values: dict[str, torch.Tensor], medium: str) -> dict[str, torch.Tensor]:
    """The tower and the projection of one medium, and what the optimizer knows of them."""
    names = {"sound": ("media.sound.",), "image": ("vision_model.", "visual_projection.")}[medium]
    return {name: value for name, value in values.items() if name.removeprefix("model.").startswith(names)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_tower_rests_in_the_steps_of_other_media(straight: tuple[Watch, Trainer]) -> None:
    watch, _ = straight
    assert watch.media == ["image", "sound", "image", "image", "sound", "image"]
    for step in range(1, STEPS):
        for medium in ("image", "sound"):
            rests = medium != watch.media[step]
            weights, moments = ([of_medium(each[at], medium) for at in (step - 1, step)]
                                for each in (watch.weights, watch.moments))  # fmt: skip
            assert weights[0]
            assert same(*weights) is rests
            assert same(*moments) is rests  # no decay of momentum, no count of a step
    assert not of_medium(watch.moments[0], "sound")
    name = next(name for name in watch.moments[-1] if name.startswith("model.media.sound.") and name.endswith("|step"))
    assert watch.moments[-1][name] == watch.media.count("sound")


def test_a_resumed_run_is_the_uninterrupted_one(root: Path, straight: tuple[Watch, Trainer]) -> None:
    watch, trainer = straight
    start = Path(trainer.args.output_dir, f"checkpoint-{STOP}")
    resumed, _ = train(root, "resumed", start=start)
    assert resumed.media == watch.media[STOP:]
    assert same(resumed.weights[-1], watch.weights[-1])
    assert same(resumed.moments[-1], watch.moments[-1])
    with pytest.raises(ValueError, match="media was 2 image, 1 sound and is 1 image, 1 sound"):
        train(root, "other", start=start, share="1,1")


def test_micro_batches_change_nothing(root: Path, straight: tuple[Watch, Trainer]) -> None:
    found, _ = train(root, "parts", parts=2)
    for name, value in straight[0].weights[-1].items():
        assert (found.weights[-1][name] - value).norm() <= TOLERANCE * max(1.0, value.norm()), name


def test_each_medium_is_measured_and_the_mean_chooses(straight: tuple[Watch, Trainer]) -> None:
    _, trainer = straight
    rows = [row for row in trainer.state.log_history if "eval_mean_recall" in row]
    assert [row["step"] for row in rows] == [STOP, STEPS]
    for row in rows:
        both = [row[f"eval_{medium}_mean_recall"] for medium in ("image", "sound")]
        assert row["eval_mean_recall"] == pytest.approx(sum(both) / 2)
        assert row["eval_image_text_to_image_chance@1"] == 2 / 16  # as many pictures have a caption
        assert 0 <= row["eval_sound_train_mean_recall"] <= 1
        assert row["eval_between_image_to_sound_chance@1"] == pytest.approx(2 / 16)  # 16 sounds of 8 things
        assert row["eval_between_sound_to_image_queries"] == 16
    assert trainer.state.best_metric == max(row["eval_mean_recall"] for row in rows)
    last = [row for row in trainer.state.log_history if "sound_loss" in row][-1]
    assert last["image_loss"] == last["loss"]


def test_what_is_saved_is_the_model_of_all(straight: tuple[Watch, Trainer]) -> None:
    watch, trainer = straight
    found = FusionDualEncoderModel.from_pretrained(trainer.args.output_dir)
    best = watch.weights[int(trainer.state.best_global_step or STEPS) - 1]
    assert same(dict(found.state_dict()), best)


def on_ranks(root: Path, folder: str, parts: int, start: Path | None, objectives: str) -> None:
    train(root, folder, parts, start, objectives)


@pytest.mark.slow
@pytest.mark.parametrize("objectives", ["contrastive", "sigmoid"])
def test_hardware_only_changes_the_speed(objectives: str, tmp_path: Path) -> None:
    """On 1, 2 and 4 processes, in 1 and 2 parts, straight on and resumed on another number of processes."""
    right = train(tmp_path, "reference", objectives=objectives)[0].weights[-1]
    began = FusionDualEncoderModel.from_pretrained(tmp_path / "reference" / f"checkpoint-{STOP}").state_dict()
    for name in ("visual_projection.weight", "media.sound.visual_projection.weight"):
        assert (began[name] - right[name]).norm() > 10 * TOLERANCE * right[name].norm()
    for world, parts in product((2, 4), (1, 2)):
        many, one, back = (f"{name}-{world}-{parts}" for name in ("many", "one", "back"))
        run_on_ranks(world, on_ranks, tmp_path, many, parts, None, objectives)
        train(tmp_path, one, parts, tmp_path / many / f"checkpoint-{STOP}", objectives)
        start = tmp_path / f"reference/checkpoint-{STOP}"
        run_on_ranks(world, on_ranks, tmp_path, back, parts, start, objectives)
        for folder in (many, one, back):
            found = FusionDualEncoderModel.from_pretrained(tmp_path / folder).state_dict()
            for name, value in right.items():
                error = (found[name] - value).norm() / max(float(value.norm()), STEPS * ADAM.learning_rate)
                assert error < TOLERANCE, f"{name} in {folder}"


@pytest.mark.slow
def test_the_script_trains_both_and_leaves_a_model_of_each(tmp_path: Path) -> None:
    towers = model_args(tmp_path)
    out = tmp_path / "out"
    with small_media():
        metrics = pretrain.main(
            ["--dataset_name", "images,sounds", "--media_share", "1,1", "--output_dir", str(out),
             "--vision_config", towers.vision_config, "--text_config", towers.text_config,
             "--fusion_layers", "0", "--objectives", "contrastive", "--global_batch_size", "16", "--max_steps", "120",
             "--learning_rate", "5e-3", "--dataloader_num_workers", "0", "--per_device_eval_batch_size", "16",
             "--min_crop_area", "1", "--report_to", "none", "--save_steps", "0"]
        )  # fmt: skip
    for name in ("image_text_to_image", "sound_text_to_image", "between_image_to_sound", "between_sound_to_image"):
        assert metrics[f"eval_{name}_recall@10"] > 0.8, name
    assert metrics["eval_between_image_to_sound_recall@1"] > 3 * metrics["eval_between_image_to_sound_chance@1"]
    whole = FusionDualEncoderModel.from_pretrained(out)
    alone = FusionDualEncoderModel.from_pretrained(out / "media/sound").eval()
    samples = torch.randn(2000).numpy(), 4000
    assert torch.allclose(whole.encode(sounds=samples), alone.encode(sounds=samples), atol=1e-6)
    assert torch.allclose(whole.encode(texts="a fox"), alone.encode(texts="a fox"), atol=1e-6)
    assert (out / "media/sound/README.md").is_file()
    assert (out / "retrieval.png").is_file()
    assert SimpleNamespace(**json.loads((out / "media/sound/config.json").read_text())).medium == "sound"


def test_a_resumed_model_of_sounds_keeps_its_pooling(tmp_path: Path) -> None:
    towers, tokenizer = model_args(tmp_path), train_tokenizer(["a fox", "an owl"] * 10, 100)
    alone = replace(towers, vision_config=f"{tmp_path}/sound.json")
    assert build_media(alone, tokenizer, None, ["sound"]).config.vision_pooling == "timed"
    for given, media in ((alone, ["sound"]), (towers, ["image", "sound"])):
        for pooling in ("pooler", "auto"):
            build_media(replace(given, vision_pooling=pooling), tokenizer, None, media).save_pretrained(
                tmp_path / "old"
            )
            found = build_media(given, tokenizer, None, media, tmp_path / "old")
            wanted = "pooler" if pooling == "pooler" else "timed"
            assert found.of("sound").config.vision_pooling == wanted
            asked = build_media(replace(given, vision_pooling="mean"), tokenizer, None, media, tmp_path / "old")
            assert asked.of("sound").config.vision_pooling == "mean"


def test_a_dry_run_weighs_the_media_by_the_shares_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers, probes = model_args(tmp_path), []
    describe = dry_run._describe
    monkeypatch.setattr(dry_run, "_describe", lambda *given: probes.append(given[2]) or describe(*given))
    monkeypatch.setattr(dry_run, "LOADER_SECONDS", 0.2)
    monkeypatch.setattr(dry_run, "CHECKED", 8)
    monkeypatch.setattr(pretrain, "finish_run", lambda *_: None)
    with small_media():
        found = pretrain.main(
            ["--dataset_name", "images,sounds", "--output_dir", str(tmp_path / "out"), "--dry_run",
             "--vision_config", towers.vision_config, "--text_config", towers.text_config,
             "--fusion_layers", "0", "--objectives", "contrastive", "--global_batch_size", "8", "--max_steps", "40",
             "--dataloader_num_workers", "0", "--report_to", "none"]
        )  # fmt: skip
    [probe] = probes
    assert [(step.medium, step.pairs) for step in probe.steps[-4:]] == [("image", 8), ("sound", 8)] * 2
    assert probe.data.turns.shares == {"image": 31, "sound": 19}  # of 40 and 24 rows, 62 and 38
    image, sound = (step.seconds for step in probe.steps[-2:])
    assert found["dry_run_model_pairs_per_second"] == pytest.approx(8 * 50 / (31 * image + 19 * sound))
    rows = MediaArguments().shares_of(probe.data, 12)
    assert rows == {"image": 50, "sound": 50}
