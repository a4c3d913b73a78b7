"""What a finished run leaves behind besides the model: pictures, the model card, the push, the next commands."""

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils.checkpoints import checkpoint_path, step_of
from mm_utils.data.images import open_image
from mm_utils.hub import HubPusher
from mm_utils.metrics import RetrievalEvaluator
from mm_utils.model_card import CardInfo, write_model_card
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.reporting import RetrievalExample, draw_retrieval, plot_training
from mm_utils.split_embeddings import Embeddings

logger = logging.getLogger(__name__)
QUERIES, HITS = 6, 5


class HubCallback(TrainerCallback):
    """Open the repository when training begins and push at every save, as `--hub_strategy` says."""

    def __init__(self, pusher: HubPusher):
        self.pusher = pusher

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show a bad token now and not after the training."""
        if state.is_world_process_zero:
            self.pusher.start()

    def on_save(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        checkpoint: Path | None = None,
        **kwargs: Any,
    ) -> None:
        """Push in the background; training may be steps ahead of `checkpoint`."""
        if state.is_world_process_zero:
            checkpoint = checkpoint or checkpoint_path(args.output_dir, state.global_step)
            self.pusher.push(f"Step {step_of(checkpoint)}", blocking=False, checkpoint=checkpoint)


def push_at_the_end(accelerator: Accelerator, pusher: HubPusher) -> str | None:
    """Push if asked to, and return the repository if all of it is there; called on all ranks.

    The process group ends first: the others would wait for the Hub in a collective, whose time limit ends a run.
    """
    if not pusher.args.push_to_hub:
        return None
    accelerator.wait_for_everyone()
    accelerator.end_training()
    pushed = accelerator.is_main_process and pusher.push("End of training", blocking=True)
    return pusher.repo_id if pushed else None


def finish_run(
    accelerator: Accelerator,
    output_dir: str,
    model: FusionDualEncoderModel,
    pairs: datasets.DatasetDict,
    evaluator: RetrievalEvaluator,
    metrics: dict[str, float],
    settings: dict[str, Any],
    pusher: HubPusher,
    trained_on: tuple[int, str],
) -> None:
    """Draw `training.png` and `retrieval.png`, write the model card, push if asked to, and say what comes next.

    `trained_on` is the number of training rows and their fingerprint.
    """
    folder = Path(output_dir)
    if accelerator.is_main_process:
        plot_training(folder / "metrics.jsonl", folder / "training.png")
        if evaluator.split is not None:
            draw_retrieval(_examples(pairs["validation"], evaluator.split), folder / "retrieval.png")
        write_model_card(folder, _card(accelerator, folder, model, pairs, metrics, settings, pusher, trained_on))
    accelerator.wait_for_everyone()
    pushed = push_at_the_end(accelerator, pusher)
    if accelerator.is_main_process:
        _say_what_is_where(folder, metrics, settings, "test" in pairs, pushed)


def _examples(rows: datasets.Dataset, split: Embeddings) -> list[RetrievalExample]:
    """Captions spread over the split, each with its first hits by cosine."""
    examples = []
    count = len(split.text_TE)
    for query in dict.fromkeys(count * place // QUERIES for place in range(QUERIES)):
        scores, found = (split.text_TE[query] @ split.image_ME.T).topk(min(HITS, len(split.image_ME)))
        own = split.caption_key_T[query]
        first = int((split.caption_key_T == own).nonzero()[0])
        row = rows[int(split.rows_M[int((split.image_key_M == own).nonzero()[0])])]
        hits = [rows[int(split.rows_M[place])]["image"] for place in found.tolist()]
        examples.append(
            RetrievalExample(
                row["captions"][query - first],
                [open_image(hit, 256) for hit in hits],
                scores.tolist(),
                (split.image_key_M[found] == own).tolist(),
            )
        )
    return examples


def _card(
    accelerator: Accelerator,
    folder: Path,
    model: FusionDualEncoderModel,
    pairs: datasets.DatasetDict,
    metrics: dict[str, float],
    settings: dict[str, Any],
    pusher: HubPusher,
    trained_on: tuple[int, str],
) -> CardInfo:
    images = len(pairs["validation"])
    shown = {name: value for name, value in metrics.items() if "_to_" in name and "chance" not in name}
    chance = {
        name: min(1.0, int(name.rpartition("@")[2]) / images) for name in shown if "text_to_image_recall@" in name
    }
    sources = ("dataset_name", "train_file", "dataset_dir")
    bases = [settings.get("vision_model_name_or_path"), settings.get("text_model_name_or_path")]
    return CardInfo(
        name=folder.resolve().name,
        vision_model=bases[0] or f"{model.vision_model.config.model_type}, from scratch",
        text_model=bases[1] or f"{model.text_model.config.model_type}, from scratch",
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dataset_name=next((settings[name] for name in sources if settings.get(name)), "The embedded scenes"),
        dataset_rows={"train": trained_on[0], **{name: len(split) for name, split in pairs.items()}},
        dataset_fingerprint=trained_on[1],
        command=f"accelerate launch {shlex.join(sys.argv)}",
        metrics=shown,
        hyperparameters={name: value for name, value in settings.items() if value is not None},
        hardware=_hardware(accelerator.device),
        precision=accelerator.mixed_precision,
        num_processes=accelerator.num_processes,
        chance=chance,
        repo_id=pusher.repo_id if pusher.args.push_to_hub else None,
        has_fusion=model.fusion is not None,
        has_dual_encoder=(folder / "dual_encoder").is_dir(),
        base_models=[base for base in bases if base and not Path(base).exists()],
    )


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def what_is_in(folder: Path, contents: Sequence[tuple[str, str]], pushed: str | None) -> list[str]:
    """Lines that name a run's folder and, of `contents`, what is there; and the repository that it was pushed to."""
    lines = ["", f"Everything is in {folder}:"]
    lines += [f"  {name:<20}{what}" for name, what in contents if (folder / name).exists()]
    return [*lines, f"  pushed to {pushed}"] if pushed else lines


def _say_what_is_where(
    folder: Path, metrics: dict[str, float], settings: dict[str, Any], has_test: bool, pushed: str | None
) -> None:
    lines = ["", "Retrieval on images that were not trained on:"]
    for direction in ("text_to_image", "image_to_text"):
        for prefix, label in (("eval_", "towers alone"), ("eval_rerank_", "re-ranked by the fusion head")):
            recalls = [metrics.get(f"{prefix}{direction}_recall@{k}") for k in (1, 5, 10)]
            if None not in recalls:
                name = f"  {direction.replace('_', ' ')}, {label}:"
                lines.append(f"{name:<48}R@1 {recalls[0]:.3f}   R@5 {recalls[1]:.3f}   R@10 {recalls[2]:.3f}")
    if "eval_text_to_image_chance@1" in metrics:
        lines.append(f"  {'chance, text to image:':<46}R@1 {metrics['eval_text_to_image_chance@1']:.3f}")
    contents = (
        ("model.safetensors", "the model, with config.json and its processor"),
        ("dual_encoder", "the two towers for stock transformers"),
        ("README.md", "the model card"),
        ("training.png", "curves"),
        ("retrieval.png", "what some captions find"),
        ("regions.png", "where some phrases point"),
        ("metrics.jsonl", "every figure that was logged"),
        ("config.yaml", "the arguments, to run it again"),
    )
    lines += what_is_in(folder, contents, pushed)
    data = next(
        (f"--{n} {settings[n]} " for n in ("dataset_name", "train_file", "dataset_dir") if settings.get(n)), ""
    )
    split = "--split test" if has_test else "--split validation --rerank_top_k 32"
    lines += ["", "Next:"]
    if not (settings.get("streaming") and settings.get("train_file")):  # shards are read by training alone
        lines.append(f"  accelerate launch scripts/eval_retrieval.py --model_name_or_path {folder} {data}{split}")
    lines += [
        f"  accelerate launch scripts/pretrain.py --config {folder}/config.yaml --output_dir {folder}-longer "
        f"--num_train_epochs {2 * settings['num_train_epochs']:g}",
        "  accelerate launch scripts/pretrain.py --train_file your_pairs.jsonl --output_dir outputs/mine",
    ]
    logger.info("\n".join(lines))
