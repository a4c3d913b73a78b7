"""Finish a run: pictures, model card, what callbacks publish, and a summary with the next commands."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

from mm_utils import distributed
from mm_utils.checkpointing.state import write_model
from mm_utils.data.images import UnreadableImageError
from mm_utils.data.media import kind_of
from mm_utils.evaluation.embeddings import right_items
from mm_utils.evaluation.reranking import describe_weights
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.reports.model_card import write_model_card
from mm_utils.reports.pictures import picture
from mm_utils.reports.plots import RetrievalExample, draw_retrieval, plot_training
from mm_utils.run.cards import (
    DIRECTIONS,
    MEASURED,
    chosen_on_validation,
    retrieval_card,
)
from mm_utils.run.commands import commands_after_training, evaluation_command, search_commands
from mm_utils.run.doors import Doors, RunContext
from mm_utils.run.start import Run
from mm_utils.text import printable

logger = logging.getLogger(__name__)

_QUERIES, _HITS = 6, 5  # of the picture of examples
_WORDS = 12  # of a caption that stands for a text to search for


def finish_run(doors: Doors, context: RunContext, argv: Sequence[str] | None) -> None:
    """Draw `training.png` and `retrieval.png`, write the card, let callbacks publish the folder, log a summary.

    The model of each medium but the first is written to `media/`, as a whole one with a card of its own.

    Args:
        doors: the callbacks of the run.
        context: the run, after its last evaluation.
        argv: the arguments that `main` was called with, None for those of the command line.
    """
    run, model, data, metrics = context.run, context.model, context.data, context.metrics
    folder, evaluators = run.output_dir, context.retrieval

    def write() -> None:
        plot_training(folder / "metrics.jsonl", folder / "training.png")
        saved = FusionDualEncoderModel.from_pretrained(folder) if model.media else model
        for own, part, found, remark in data.shares(run, metrics):
            of_medium, split = saved.of(part.medium), evaluators[part.medium].split
            if own.output_dir != folder:
                write_model(own.output_dir, of_medium, part.processor)
            if split is not None:
                draw_examples(part.splits["validation"], evaluators[part.medium], own.output_dir / "retrieval.png")
            card = retrieval_card(own, of_medium, part, split, found, argv)
            card.table_note += remark
            write_model_card(own.output_dir, card)

    distributed.on_first(write)
    doors.publish(context)
    if run.accelerator.is_main_process:
        logger.info("%s", "\n".join(_retrieval_summary(context)))
    run.accelerator.end_training()


def draw_examples(rows: datasets.Dataset, evaluator: RetrievalEvaluator, out_path: Path) -> None:
    """Draw what captions spread over the last split find, re-ranked if the head re-ranks.

    Args:
        rows: the split that was evaluated.
        evaluator: its last evaluation.
        out_path: the PNG to write.
    """
    split, ranks = evaluator.split, evaluator.directions["text_to_image"]
    assert split is not None
    (texts, images), examples = split.directions["text_to_image"], []
    count, kind = len(split.text_TE), kind_of(rows.features)
    for query in dict.fromkeys(count * place // _QUERIES for place in range(_QUERIES)):
        own, towers = split.caption_key_T[query], int(ranks.cosine_Q[query])
        if ranks.reranked_items is not None and ranks.reranked_scores is not None:
            found, scores = ranks.reranked_items[query, :_HITS], ranks.reranked_scores[query, :_HITS]
            note = f"right {kind}: place {int(ranks.reranked_Q[query]):,}\nby the encoders alone: {towers:,}"
        else:
            scores, found = (split.text_TE[query] @ split.image_ME.T).topk(min(_HITS, len(split.image_ME)))
            note = f"right {kind}: place {towers:,}"
        first = int((split.caption_key_T == own).nonzero()[0])
        row = rows[int(split.rows_M[int((split.image_key_M == own).nonzero()[0])])]
        examples.append(
            RetrievalExample(
                row["captions"][query - first],
                [_picture(rows[int(split.rows_M[place])]["image"], kind) for place in found.tolist()],
                scores.tolist(),
                right_items(texts.take(slice(query, query + 1)), images, found[None])[0].tolist(),
                f"{note} of {len(split.image_ME):,}",
            )
        )
    draw_retrieval(examples, out_path)


def _picture(value: dict[str, Any], kind: str) -> Image.Image:
    """Return a medium's picture, grey if the part that it draws is damaged."""
    try:
        return picture(value, kind, 256)
    except UnreadableImageError as error:
        logger.warning("%s, so retrieval.png shows it grey", error)
        return Image.new("RGB", (256, 256), "lightgrey")


# -- summaries ----------------------------------------------------------------------------------------------------------


def _retrieval_summary(context: RunContext) -> list[str]:
    run, model, data, metrics = context.run, context.model, context.data, context.metrics
    folder, lines = run.output_dir, []
    for share in data.shares(run, metrics):
        medium = share.data.medium
        title = f"Retrieval on the {medium}s of the validation split, which were not trained on:"
        lines += ["", title, *_recalls(share.metrics, medium)]
    lines += [f"  {name.removeprefix('eval_')}: {value:.3f}" for name, value in metrics.items() if "_between_" in name]
    lines += [f"  {described}" for described in [describe_weights(model)] if described]
    if "eval_moment_iou0.5" in metrics:
        found, fixed = metrics["eval_moment_iou0.5"], metrics["eval_moment_iou0.5_fixed"]
        lines.append(f"  {'moments found (IoU of at least 0.5):':<46}{found:.3f}   the best fixed span: {fixed:.3f}")
    lines += choices(run, metrics, model)
    contents = {
        "model.safetensors": "the model, with config.json and its processor",
        "dual_encoder": "the two towers for stock transformers",
        "media": "the models of the other media, each whole, with the same text tower",
        "README.md": "the model card, with code to use the model",
        "training.png": "curves",
        "retrieval.png": "what some captions find",
        "embedding_sizes.png": "recall over the bytes of an embedding",
        "regions.png": "where some phrases point",
        "moments.png": "when some phrases happen, as predicted",
        "wise_ft.png": "weights between the start and the end",
        "metrics.jsonl": "every figure that was logged",
        "config.yaml": "the arguments, to run it again",
    }
    commands = []
    for own, part, *_ in data.shares(run, metrics):
        query = printable(" ".join(part.splits["validation"][0]["captions"][0].split()[:_WORDS])).lstrip("-")
        has_test = "test" in part.splits
        if own.output_dir == folder:
            flags = {"has_test": has_test, "has_fusion": model.fusion is not None}
            commands += commands_after_training(folder, own.settings, **flags, query=query)
        else:
            command = evaluation_command(own.output_dir, own.settings, "test" if has_test else "validation")
            commands += [*filter(None, [command]), *search_commands(own.output_dir, own.settings, query)]
    return [
        *lines,
        *listing(folder, contents, context.published),
        "",
        "Next:",
        *(f"  {command}" for command in commands),
    ]


def _recalls(metrics: dict[str, float], medium: str) -> list[str]:
    lines = []
    for direction, name in DIRECTIONS.items():
        for prefix, label in MEASURED.items():
            recalls = [metrics.get(f"{prefix}{direction}_recall@{k}") for k in (1, 5, 10)]
            if None not in recalls:
                title = f"  {name.replace('image', medium)}, {label}:"
                lines.append(f"{title:<48}R@1 {recalls[0]:.3f}   R@5 {recalls[1]:.3f}   R@10 {recalls[2]:.3f}")
    if "eval_text_to_image_chance@1" in metrics:
        lines.append(f"  {f'text to {medium}, by chance:':<46}R@1 {metrics['eval_text_to_image_chance@1']:.3f}")
    return lines


def choices(run: Run, metrics: dict[str, float], model: FusionDualEncoderModel | None = None) -> list[str]:
    """Return what the validation split has chosen, as lines of a summary."""
    alpha, sentence = metrics.get("eval_wise_ft_alpha"), chosen_on_validation(run, metrics, model)
    lines = [] if alpha is None else [f"  saved with alpha {alpha:g} between the start and the end"]
    return [*lines, f"  {sentence.rstrip()}"] if sentence else lines


def listing(folder: Path, contents: dict[str, str], published: Sequence[str]) -> list[str]:
    """Return lines that name the folder, what exists in it, and where callbacks have published it."""
    lines = ["", f"Everything is in {folder}:"]
    lines += [f"  {name:<20}{text}" for name, text in contents.items() if (folder / name).exists()]
    return [*lines, *(f"  {place}" for place in published)]
