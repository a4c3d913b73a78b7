"""Finish a run: pictures, model card, and a summary with the next commands."""

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from PIL import Image
from transformers import AutoConfig

from mm_utils import distributed
from mm_utils.arguments import Parsed, launch_command, launcher, python, to_words
from mm_utils.checkpointing.files import seal_model
from mm_utils.data.arguments import DataArguments, LoaderArguments
from mm_utils.data.batches.tokens import unread_captions
from mm_utils.data.media import COLUMNS, kind_of
from mm_utils.data.media.pictures import picture
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.arguments import EvaluationArguments
from mm_utils.evaluation.embeddings import right_items
from mm_utils.evaluation.metrics import CUTOFFS
from mm_utils.evaluation.recall_gain import BEFORE, CLOSED_FORM, Gain, recall_gained
from mm_utils.evaluation.recall_table import RecallTable, recall_table
from mm_utils.evaluation.reranking import describe_weights, stored_weights
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.hub import licence_of
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.reading import UnreadableError
from mm_utils.plots import RetrievalExample, draw_retrieval, plot_training
from mm_utils.reports.model_card import (
    CardInfo,
    an,
    encoder,
    listed,
    millions,
    search_code,
    write_model_card,
)
from mm_utils.run.restarts import A_NOTEBOOK, device_name, earlier_starts
from mm_utils.run.start import Run
from mm_utils.text import markdown_text, printable, sentence_case
from mm_utils.training.arguments import METRICS_FILE
from mm_utils.training.stages import Stage
from mm_utils.training.starts import has_sample

logger = logging.getLogger(__name__)

SOURCES = ("dataset_name", "train_file")
_LOOKED_AT = 50  # images of which one has the text that is searched for in the next commands
_QUERIES = 6  # of the picture of examples
_HITS = 5
_FEWEST_WORDS = 3
_WORDS = 12  # of a caption that stands for a text to search for


@dataclass(frozen=True)
class Trained:
    """What a run has trained.

    Attributes:
        stages: all stages of the run, what each trained included.
        metrics, choice: those of the saved model; which weights are saved, and what chose them.
        repository: that on the Hub which the model is pushed to.
    """

    run: Run
    given: Parsed
    data: TrainingData
    model: Any
    stages: Sequence[Stage]
    metrics: dict[str, float]
    choice: str
    repository: str | None = None

    @property
    def name(self) -> str:
        """What a card names: the repository on the Hub, or the folder, without those of this machine that it lies in."""
        folder = self.run.output_dir.resolve()
        here = Path.cwd()
        return self.repository or str(folder.relative_to(here) if folder.is_relative_to(here) else folder.name)


class Report(NamedTuple):
    """What the card and the summary of a pre-training say.

    Attributes:
        said: sentences on what training and re-ranking gained.
        example: a text that finds its image, or other medium.
    """

    gain: Gain
    table: RecallTable
    said: list[str]
    example: str


def _report(trained: Trained, evaluator: RetrievalEvaluator, is_paired: bool) -> Report:
    """Return what is said of a run; `evaluator` is that of the last evaluation, and `is_paired` as for `recall_gained`."""
    run = trained.run
    medium = trained.data.medium
    bases = _bases(trained)
    start_name = CLOSED_FORM if all(bases) and has_sample(trained.data) else ""
    if (whole := run.settings["model_name_or_path"]) and bases == [whole, whole]:
        start_name = BEFORE
    log = run.output_dir / METRICS_FILE
    gain = recall_gained(evaluator, log, medium, is_paired=is_paired, start_name=start_name)
    table = recall_table(_with_head(trained.metrics, trained.model), evaluator.split, medium, gain)
    said = [sentence_case(text) for text in (gain.sentence, describe_weights(trained.model)) if text]
    return Report(gain, table, said, example_text(trained.data, evaluator))


def retrieval_card(trained: Trained, report: Report, argv: Sequence[str] | None) -> CardInfo:
    """Return the card of a pre-trained model."""
    run = trained.run
    model = trained.model
    data = trained.data
    medium = trained.data.medium
    stock = run.output_dir / "dual_encoder"
    has_fusion = _reranks(model)
    seen = next(name for name in ("train", "validation") if name in data.splits)
    note = [
        f"Measured on the {report.table.images:,} {medium}s of the validation split and their captions.",
        *report.table.notes,
        *report.said,
        chosen_on_validation(trained),
        *unread_captions(data.splits[seen], data.processor.tokenizer, data.max_seq_length, f"The captions of {seen}"),
    ]
    terms = [name.rpartition(".")[2].replace("_", " ") for name in trained.given[ObjectiveArguments].weights]
    losses = f"the {markdown_text(listed(terms))} loss{'es' * (len(terms) > 1)}"
    head = ", and a cross-attention fusion head that re-ranks the best candidates" if has_fusion else ""
    about = f"{describe_towers(trained, model)}, trained with {losses}{head}: {describe_sizes(trained, model)}."
    if report.gain.saved_step == 0:
        about += f" No step was better: {report.gain.start} is saved as it was."
    if report.gain.start_name == CLOSED_FORM:
        about += " Its projections were computed from the pairs in closed form, before the first step."
    if not any([*_bases(trained), *(run.settings.get(name) for name in SOURCES)]):
        about += " It has seen drawn scenes alone, and knows nothing of photographs."
    dual_encoder = AutoConfig.from_pretrained(stock).architectures[0] if stock.is_dir() else ""
    return run_card(
        trained,
        argv,
        about=f"{about} It finds {medium}s for a text and texts for {an(medium)}.",
        usage=search_code(trained.name, medium, has_fusion, dual_encoder, report.example),
        medium=medium,
        table=(["recall among the first", *map(str, CUTOFFS)], report.table.rows),
        table_note=" ".join(filter(None, note)),
        dataset_rows={"train": data.num_rows, **{name: len(rows) for name, rows in data.splits.items()}},
        dataset_fingerprint=data.fingerprint,
        tags=(f"{COLUMNS[medium]}-text-retrieval", "dual-encoder", "contrastive-learning"),
        limits="Its scores rank candidates; they are not probabilities.",
        pipeline_tag="feature-extraction",
    )


def _bases(trained: Trained) -> list[str | None]:
    """Return what the encoders of media and of texts started from; None for one from scratch."""
    settings = trained.run.settings
    return [
        settings.get(f"{tower}_model_name_or_path") or settings["model_name_or_path"] for tower in ("vision", "text")
    ]


def describe_towers(trained: Trained, model: Any) -> str:
    """Return what the encoders are, what they started from and whether a stage trained them, as the beginning of a sentence."""
    learnt = [name for stage in trained.stages for name in stage.trains]
    found = []
    for (tower, backbone), base in zip(model.towers.items(), _bases(trained), strict=False):
        start = f"the local folder {Path(base).absolute().name}" if base and Path(base).exists() else base
        if base and (licence := licence_of(base)):
            start = f"{start}, licence {licence}"
        kind = backbone.config.model_type
        is_frozen = not any(name.startswith(f"model.{tower}_model.") for name in learnt)
        medium = "text" if tower == "text" else trained.data.medium
        found.append(encoder(medium, f"{kind} of {start}" if start else f"{kind}, from scratch", is_frozen))
    return sentence_case(listed(found))


def describe_sizes(trained: Trained, model: Any) -> str:
    """Return how many parameters a model has, and how many of them each stage trained."""
    every = sum(weight.numel() for weight in model.parameters())
    sizes = []
    for stage in trained.stages:
        sizes.append(sum(size for name, size in stage.trains.items() if name.startswith("model.")))
    said = f"{millions(every)} parameters in all"
    if len(sizes) > 1:
        return (
            f"{said}; {millions(sizes[0])} of them were trained first, with the encoders, and {millions(sizes[1])} then, with the "
            "fusion head"
        )
    return said if millions(sizes[0]) == millions(every) else f"{said}, of which {millions(sizes[0])} were trained"


def _reranks(model: FusionDualEncoderModel) -> bool:
    """Return whether a search reorders by the fusion head: it has weights above 0."""
    return model.fusion is not None and bool(stored_weights(model))


def _with_head(metrics: Mapping[str, float], model: FusionDualEncoderModel) -> dict[str, float]:
    """Return the metrics; without those of a head that reorders nothing."""
    return {name: value for name, value in metrics.items() if _reranks(model) or not name.startswith("eval_rerank_")}


def chosen_on_validation(trained: Trained) -> str:
    """Return sentences on what is saved and what the validation split has chosen; "" if it has chosen nothing.

    It also chooses the weights of re-ranking, but its own figures are cross-fitted.
    """
    alpha = trained.metrics.get("eval_wise_ft_alpha")
    chosen = [
        *(["the checkpoint"] if trained.run.args.keeps_best else []),
        *([f"alpha {alpha:g} between the start and the end"] if alpha is not None else []),
    ]
    too_high = "so its figures are slightly too high; those of a test split are not."
    also = f"The validation split also chose {listed(chosen)}, {too_high}" if chosen else ""
    return " ".join(filter(None, [trained.choice, also]))


def _first_command(run: Run, argv: Sequence[str] | None) -> str:
    """Return the command that took the first step of the run, which others may have resumed, and before which some may have failed."""
    starts = earlier_starts(run.output_dir)
    began = [start for start in starts if start.get("resumed_from") == 0][-1:]
    if began and began != starts[-1:] and began[0]["command"] != A_NOTEBOOK:
        return f"{launcher()} {began[0]['command']}"
    return launch_command(run.name, sys.argv[1:] if argv is None else argv)


def run_card(trained: Trained, argv: Sequence[str] | None, **values: Any) -> CardInfo:
    """Return a card with what the cards of all runs have, and `values`."""
    run = trained.run
    accelerator = trained.run.accelerator
    defaults = trained.given.defaults
    trained_on = run.settings.get("dataset_name")
    return CardInfo(
        name=run.output_dir.resolve().name,
        dataset_name=next((run.settings[name] for name in SOURCES if run.settings.get(name)), "The embedded scenes"),
        command=_first_command(run, argv),
        metrics=trained.metrics,
        datasets=[trained_on] if trained_on and not Path(trained_on).exists() else [],
        hyperparameters={
            name: value
            for name, value in run.settings.items()
            if value is not None and (value != defaults.get(name) or name in trained.given.named)
            if name != "resume_from_checkpoint"  # the command is that of the first start
        },
        environment={
            "hardware": device_name(accelerator.device).replace("cpu", f"CPU, {os.cpu_count()} cores"),
            "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
            "processes": accelerator.num_processes,
            "pairs a step": trained.data.order.sizes.sizes[-1],  # at most all rows
        },
        base_models=[base for base in dict.fromkeys(_bases(trained)) if base and not Path(base).exists()],
        **values,
    )


def finish_run(
    trained: Trained, evaluator: RetrievalEvaluator, argv: Sequence[str] | None, resumed: bool = False
) -> None:
    """Finish a pre-training, whose evaluator of the validation split is given: also draw `retrieval.png`.

    `argv` are the arguments that `main` was called with, None for those of the command line.
    """
    rows = trained.data.splits["validation"]
    reranks = _reranks(trained.model)
    report = distributed.on_first(lambda: _report(trained, evaluator, is_paired=not resumed))
    finish(
        trained,
        report.gain,
        lambda folder: draw_examples(
            rows, evaluator, trained.model.logit_scale.exp().item(), folder / "retrieval.png", reranks=reranks
        ),
        lambda: retrieval_card(trained, report, argv),
        lambda: _retrieval_summary(trained, report),
        without=() if reranks else ("eval_rerank_mean_recall",),
    )


def finish(
    trained: Trained,
    gain: Gain | None,
    write: Callable[[Path], None],
    card: Callable[[], CardInfo],
    summary: Callable[[], list[str]],
    without: Sequence[str] = (),
) -> None:
    """Draw `training.png` but for the figures `without`, let `write` write into the folder, write the card, log a summary."""
    run = trained.run
    folder = trained.run.output_dir

    def write_all() -> None:
        plot_training(folder / METRICS_FILE, folder / "training.png", gain=gain, without=without)
        write(folder)
        write_model_card(folder, card())
        seal_model(folder)

    distributed.on_first(write_all)
    if run.accelerator.is_main_process:
        logger.info("%s", "\n".join(summary()))
    run.accelerator.end_training()


def draw_examples(
    rows: datasets.Dataset, evaluator: RetrievalEvaluator, logit_scale: float, out_path: Path, reranks: bool
) -> None:
    """Draw what captions spread over the split that was evaluated last find, re-ranked if the head re-ranks.

    Scores are cosines, with what the head adds divided by the logit scale, as those of a search are.
    """
    split = evaluator.split
    ranks = evaluator.directions["text_to_image"]
    texts, images = split.directions["text_to_image"]
    examples = []
    count = len(split.text_TE)
    kind = kind_of(rows.features)
    # a split of fewer captions gives some places twice
    for query in dict.fromkeys(count * place // _QUERIES for place in range(_QUERIES)):
        own = split.caption_key_T[query]
        towers = int(ranks.cosine_Q[query])
        if reranks and ranks.reranked_items is not None and ranks.reranked_scores is not None:
            found = ranks.reranked_items[query, :_HITS]
            scores = ranks.reranked_scores[query, :_HITS] / logit_scale
            note = f"right {kind}: place {int(ranks.best_Q[query]):,}\nby the encoders alone: {towers:,}"
        else:
            scores, found = (split.text_TE[query] @ split.image_ME.T).topk(min(_HITS, len(split.image_ME)))
            note = f"right {kind}: place {towers:,}"
        first = int((split.caption_key_T == own).nonzero()[0])
        row = rows[int(split.rows_M[int((split.image_key_M == own).nonzero()[0])])]
        correct = right_items(texts.take(slice(query, query + 1)), images, found[None])[0].tolist()
        examples.append(
            RetrievalExample(
                row["captions"][query - first],  # an image's captions are neighbours
                [_picture(rows[int(split.rows_M[place])]["image"], kind) for place in found.tolist()],
                scores.tolist(),
                correct,
                f"{note} of {len(split.image_ME):,}",
                None if any(correct) else _picture(row["image"], kind),
            )
        )
    score = "score, the cosine with the text plus what the head adds" if reranks else "cosine with the text"
    about = f"Captions at equal distances over the validation split, and what each finds, the best first. Below each {kind}: its {score}."
    if kind == "sound":
        about += " A sound is drawn over its time, its highest frequency on top."
    draw_retrieval(examples, out_path, about)


def _picture(value: dict[str, Any], kind: str) -> Image.Image:
    """Return a medium's picture, grey if the part that it draws is damaged."""
    try:
        return picture(value, kind, 256)
    except UnreadableError as error:
        logger.warning("%s, so retrieval.png shows it grey", error)
        return Image.new("RGB", (256, 256), "lightgrey")


# -- summaries ----------------------------------------------------------------------------------------------------------


def _retrieval_summary(trained: Trained, report: Report) -> list[str]:
    return [
        *report.table.lines("the validation split, which were not trained on"),
        *(f"  {sentence}" for sentence in report.said),
        *closing_lines(trained, next_commands(trained, report.example)),
    ]


def closing_lines(trained: Trained, commands: Sequence[str]) -> list[str]:
    """Return the last lines of a summary: what validation has chosen, where everything is, and what to try next."""
    return [
        *(f"  {sentence}" for sentence in [chosen_on_validation(trained)] if sentence),
        "",
        f"Everything is in {trained.run.output_dir}; its README.md has the figures, and code to use the model.",
        *(["", "Next:"] if commands else []),
        *(f"  {command}" for command in commands),
    ]


def next_commands(trained: Trained, example: str) -> list[str]:
    """Return what measures, fine-tunes, embeds and searches for `example`; nothing after a stream, which training alone reads."""
    data = trained.data
    folder = trained.run.output_dir
    settings = trained.run.settings
    if settings.get("streaming"):
        return []
    commands = [evaluation_command(folder, settings, "test")] if "test" in data.splits else []
    if trained.model.fusion is not None and not any(settings.get(name) for name in SOURCES):
        commands.append(launch_command("finetune", ["--model_name_or_path", str(folder)]))
    index = f"{folder.resolve() if folder.name in ('', '..') else folder}-index"
    rows = to_words(DataArguments, settings, ["max_train_samples", "max_eval_samples"])
    words = ["--model_name_or_path", str(folder), *rows, "--index_dir", index]
    found = ["--index_dir", index, "--query", example]
    return [*commands, launch_command("embed", words), launch_command("search", found, python())]


def example_text(data: TrainingData, evaluator: RetrievalEvaluator) -> str:
    """Return a caption of the validation split to search for, if there is one that finds its image first, in at most twelve words.

    Of the first images it is the shortest, which is shown whole.
    """
    split = evaluator.split
    best_Q = evaluator.directions["text_to_image"].best_Q.cpu()
    key_Q = split.caption_key_T.cpu()
    rows = data.splits["validation"].select_columns(["captions"])
    texts: list[str] = []
    found: list[str] = []
    for row, key in zip(split.rows_M[:_LOOKED_AT].tolist(), split.image_key_M.tolist(), strict=False):
        ranks = best_Q[key_Q == key].tolist()
        for text, rank in zip(rows[row]["captions"], ranks, strict=False):
            texts.append(text)
            found += [text] if rank == 1 else []
    shortest = min(found or texts, key=lambda text: (len(text.split()) < _FEWEST_WORDS, len(text)))
    shortest = re.split(r"(?<=[.!?])\s", shortest)[0]  # whole sentences are read by people
    return printable(" ".join(shortest.split()[:_WORDS])).lstrip("-")  # a hyphen would make a flag of it


def evaluation_command(folder: Path, settings: Mapping[str, Any], split: str) -> str:
    """Return what measures retrieval on a split of a run's data."""
    words = ["--model_name_or_path", str(folder), *to_words(DataArguments, settings, ["max_train_samples"])]
    if settings["max_seq_length"] != LoaderArguments.max_seq_length:
        words += ["--max_seq_length", str(settings["max_seq_length"])]
    words += to_words(EvaluationArguments, settings, ["rerank_top_k"])
    return launch_command("eval_retrieval", [*words, "--split", split])
