"""Write the model card: training data, results, settings, and how to load the model."""

import json
import logging
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from mm_utils.data.media import COLUMNS
from mm_utils.data.rows.source import is_embedded
from mm_utils.files import optional_file
from mm_utils.text import (
    markdown_table,
    markdown_text,
    printable,
    publishable,
    redact,
    without_secrets,
)

logger = logging.getLogger(__name__)

RETRIEVAL_TAGS = ("dual-encoder", "contrastive-learning")
DIRECTIONS = {"text_to_image": "text to image", "image_to_text": "image to text"}
STAGES = {"": "the two encoders", "rerank_": "re-ranked by the fusion head"}
MEASURES = ("recall@1", "recall@5", "recall@10", "ndcg@10", "mrr@10")


class EvaluatedData(NamedTuple):
    """What a model was measured on.

    Attributes:
        name: for people.
        repository: the data set of the Hub, or a word of its own where it is none: by it the Hub tells data sets apart.
        split: train, validation or test.
        counts: what was measured, by name, such as the number of images.
        medium: the kind of media, of `mm_utils.data.media.COLUMNS`.
    """

    name: str
    repository: str
    split: str
    counts: Mapping[str, int]
    medium: str = "image"

    def result(self, task: str, measure: str, value: float, title: str) -> EvalResult:
        """Return a figure, under a title."""
        name, repository = (" ".join(printable(publishable(text)).split()) for text in (self.name, self.repository))
        return EvalResult(
            task_type=task,
            dataset_type=repository,
            dataset_name=name,
            dataset_split=self.split,
            dataset_args=dict(self.counts),
            metric_type=measure,
            metric_value=round(value, 4),
            metric_name=title,
        )


def data_names(settings: Mapping[str, Any], embedded: str) -> tuple[str, str]:
    """Return name and repository of the named data, `embedded` where none is named.

    A path is shortened to its last two parts.
    """
    flags = ("dataset_name", "train_file", "dataset_dir", "validation_file", "test_file")
    given = next((settings[flag] for flag in flags if settings.get(flag)), None)
    if given is None:
        return embedded, f"embedded-{_slug(embedded)}"
    if is_embedded(given):
        return f"The embedded {given}", f"embedded-{given}"
    if given == settings.get("dataset_name") and is_on_hub(given):
        return given, given
    name = "/".join(Path(given).parts[-2:])
    return name, f"local-{_slug(name)}"


def is_on_hub(dataset_name: str) -> bool:
    """Return whether --dataset_name means a data set on the Hub."""
    return not is_embedded(dataset_name) and not Path(dataset_name).exists()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-").lower()


def retrieval_results(metrics: Mapping[str, float], data: EvaluatedData, prefix: str = "") -> list[EvalResult]:
    """Return both directions' recall, nDCG, MRR, and re-ranked ones, named by `prefix`."""
    return [
        data.result(
            f"{COLUMNS[data.medium]}-text-retrieval",
            measure,
            metrics[name],
            f"{measure}, {title.replace('image', data.medium)}, {STAGES[stage]}",
        )
        for direction, title in DIRECTIONS.items()
        for stage in STAGES
        for measure in MEASURES
        if (name := f"{prefix}{stage}{direction}_{measure}") in metrics
    ]


EXAMPLES = {  # of code: what a person has, how to make some, and a text
    "image": (
        "pictures, or paths to them",
        'pictures = [Image.new("RGB", (224, 224), colour) for colour in ("red", "green", "blue")]',
        "something red",
    ),
    "clip": (
        "clips, lists of frames, or paths to videos (pip install av)",
        """\
turns = (("red", "blue"), ("blue", "red"), ("green", "white"))
clips = [[Image.new("RGB", (224, 224), colour) for colour in colours for _ in range(8)] for colours in turns]""",
        "something turns red",
    ),
    "sound": (
        "sounds, (samples in [-1, 1], rate), or paths to WAV files",
        """\
times = torch.arange(48000) / 16000
sounds = [(torch.sin(2 * torch.pi * hertz * times), 16000) for hertz in (220, 880, 3520)]""",
        "a low tone",
    ),
}
_LIBRARIES = ("torch", "transformers", "accelerate", "datasets")
_PICTURES = {
    "Training curves": "training.png",
    "Retrieved {}s": "retrieval.png",
    "Moments": "moments.png",
    "Confusions": "confusion.png",
    "Between the start and the end of training": "wise_ft.png",
}


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a result depends on."""
    return {"python": platform.python_version(), **{library: version(library) for library in _LIBRARIES}}


@dataclass
class CardInfo:
    """The content of a model card; secrets in it are redacted when it is written.

    Attributes:
        medium: the kind of media, of `mm_utils.data.media.COLUMNS`.
        model: what `from_pretrained` takes: the absolute path of the folder, or the repository on the Hub.
        glance: titles and texts of what a person reads first.
        table, table_note: titles and rows of the results, and a sentence below them.
        metrics: all metrics by name.
        pipeline_tag: a pipeline that takes the model; None if there is none.
        usage: returns the code that uses the model, by its quoted name and its medium; None for a model of retrieval.
        results: what was measured, for the Hub.
        license: an identifier of the Hub; None if it is not known.
        datasets: the training data on the Hub.
    """

    name: str
    model: str
    vision_model: str
    text_model: str
    num_parameters: int
    dataset_name: str
    dataset_rows: dict[str, int]
    dataset_fingerprint: str
    command: str
    table: tuple[list[str], list[list[str]]]
    metrics: dict[str, float]
    hyperparameters: dict[str, Any]
    hardware: str
    precision: str
    num_processes: int
    medium: str = "image"
    table_note: str = ""
    has_fusion: bool = True
    dual_encoder: str = ""  # the class in `dual_encoder/`, if there is one
    pipeline_tag: str | None = "feature-extraction"
    tags: tuple[str, ...] = ()
    summary: str | None = None
    usage: Callable[[str, str], str] | None = None
    glance: list[tuple[str, str]] = field(default_factory=list)
    results: list[EvalResult] = field(default_factory=list)
    license: str | None = None
    datasets: list[str] = field(default_factory=list)
    base_models: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=library_versions)


def write_model_card(output_dir: Path, card: CardInfo) -> Path:
    """Write ``README.md`` into `output_dir`, with the pictures that exist; return its path."""
    titles, rows = card.table
    encoders = f"{an(card.medium).capitalize()} encoder ({_text(card.vision_model)}) and a text encoder ({_text(card.text_model)})"
    size = f"{card.num_parameters / 1e6:,.1f} million parameters in all"
    fusion = ", and a cross-attention fusion head that re-ranks the best candidates" if card.has_fusion else ""
    retrieval = (
        f"{encoders} trained together with a contrastive loss{fusion}: {size}. It finds {card.medium}s for a text and texts "
        f"for {an(card.medium)}."
    )
    metrics = [[_code(name), f"{value:.4g}"] for name, value in card.metrics.items()]
    setting = {"hardware": card.hardware, "precision": card.precision, "processes": card.num_processes}
    hyperparameters, usage = without_secrets(card.hyperparameters, publishable), _usage(card)
    parts = [
        f"---\n{_front_matter(card).to_yaml()}\n---",
        f"# {_text(card.name)}",
        retrieval if card.summary is None else f"{_text(card.summary)} {encoders}, {size}.",
        markdown_table(["at a glance", ""], [[title, _text(text)] for title, text in _glance(card)]),
        "## Use",
        usage,
        "## Results",
        markdown_table(list(map(_text, titles)), [list(map(_text, row)) for row in rows]),
        *([card.table_note] if card.table_note else []),
        _details("All metrics", markdown_table(["metric", "value"], metrics)),
        *(
            f"![{title.format(card.medium)}]({name})"
            for title, name in _PICTURES.items()
            if (output_dir / name).is_file()
        ),
        "## Data",
        f"{_text(card.dataset_name)}, fingerprint {_code(card.dataset_fingerprint)}.",
        markdown_table(["split", "rows"], [[_text(split), f"{rows:,}"] for split, rows in card.dataset_rows.items()]),
        "## Training",
        _fenced("bash", card.command),
        markdown_table(["setting", "value"], [[_text(k), _text(v)] for k, v in {**setting, **card.versions}.items()]),
        _details(
            "All arguments",
            markdown_table(["name", "value"], [[_code(k), _code(v)] for k, v in hyperparameters.items()]),
        ),
        "## Limitations",
        "The model knows only what its training pairs show, their language and their biases included. Its scores rank "
        "candidates; they are not probabilities. Measure it on your own data before relying on it.",
    ]
    path = output_dir / "README.md"
    # The code alone names the folder in full, until there is a repository: it runs as pasted.
    shown = "\n\n".join(part if part is usage else publishable(part) for part in parts)
    with optional_file(path):
        path.write_text(f"{shown}\n", encoding="utf-8")
    return path


def an(medium: str) -> str:
    """Return a medium with its article."""
    return f"an {medium}" if medium == "image" else f"a {medium}"


def _front_matter(card: CardInfo) -> ModelCardData:
    def known(values: list[str]) -> list[str] | None:
        return [" ".join(printable(value).split()) for value in values] or None

    return ModelCardData(
        license=card.license,
        library_name="transformers",
        pipeline_tag=card.pipeline_tag,
        tags=[*(card.tags or _retrieval_tags(card.medium)), *_medium_tags(card.medium), "custom_code"],
        base_model=known(card.base_models),
        datasets=known(card.datasets),
        metrics=list(dict.fromkeys(result.metric_type for result in card.results)) or None,
        model_name=" ".join(printable(card.name).split()) if card.results else None,
        eval_results=card.results or None,
    )


def _retrieval_tags(medium: str) -> list[str]:
    return [f"{COLUMNS[medium]}-text-retrieval", *RETRIEVAL_TAGS]


def _medium_tags(medium: str) -> list[str]:
    return [] if medium == "image" else [COLUMNS[medium]]


def _glance(card: CardInfo) -> list[tuple[str, str]]:
    """Return what a person reads first: data, results, licence."""
    count = card.dataset_rows.get("train", 0)
    unit = f"{card.medium}s" if card.usage is None else "rows"
    rows = [("trained on", f"{card.dataset_name}, {count:,} {unit}")]
    return [*rows, *card.glance, ("licence", card.license or "not stated; ask who trained it")]


def _usage(card: CardInfo) -> str:
    """Return code that runs as pasted, in any folder."""
    name = json.dumps(card.model, ensure_ascii=False)
    return _fenced("python", _search_code(name, card) if card.usage is None else card.usage(name, card.medium))


def _search_code(name: str, card: CardInfo) -> str:
    stock = f", {card.dual_encoder}" if card.dual_encoder else ""
    medium, own, made, text = card.medium, *EXAMPLES[card.medium]
    media = "pictures" if medium == "image" else f"{medium}s"
    code = f"""\
{"import torch" if medium == "sound" else "from PIL import Image"}
from transformers import AutoModel{stock}

folder = {name}
model = AutoModel.from_pretrained(folder, trust_remote_code=True)  # its code comes with it

# Embed: vectors of length 1. Take your own {own}, and texts.
{made}
{medium}_embeds, text_embeds = model.encode({medium}s={media}, texts=["{text}"])

# Search: the cosine of the text with every {media[:-1]}, the best first.
cosine = model.similarity(text_embeds, {medium}_embeds)[0]
for place in cosine.argsort(descending=True).tolist():
    print(f"{{cosine[place]:.3f}}  {media[:-1]} {{place}}")"""
    if card.has_fusion:
        code += f"""

# Re-rank: the fusion head reads the text and each of the best {media} together.
print("re-ranked:", [place for place, score in model.rerank("{text}", {media})])"""
    if card.dual_encoder:
        code += f"""

# The two encoders alone, with the class that transformers ships.
dual_encoder = {card.dual_encoder}.from_pretrained(folder, subfolder="dual_encoder")"""
    return code


def _details(title: str, text: str) -> str:
    """Fold a long text."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _text(value: object) -> str:
    return markdown_text(publishable(str(value)))


def _code(value: object) -> str:
    """Format a code span for a table; its fence is longer than any run of backticks inside."""
    text = " ".join(printable(publishable(str(value))).split()).replace("|", r"\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text or not text else f"`{text}`"


def _fenced(language: str, text: str) -> str:
    text = printable(redact(text))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
