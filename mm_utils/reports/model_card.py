"""Write the model card: training data, results, settings, and how to load the model."""

import json
import logging
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from mm_utils.data.media import COLUMNS
from mm_utils.data.rows.source import is_embedded
from mm_utils.evaluation.metrics import CUTOFFS
from mm_utils.files import optional_file
from mm_utils.text import markdown_table, markdown_text, printable, publishable, redact, without_secrets

logger = logging.getLogger(__name__)

RETRIEVAL_TAGS = ("dual-encoder", "contrastive-learning")
DIRECTIONS = {"text_to_image": "text to image", "image_to_text": "image to text"}
MEASURED = {"eval_": "encoders alone", "eval_rerank_": "re-ranked by the fusion head"}
EMBEDDED = "The embedded scenes"


def eval_results(
    settings: Mapping[str, Any],
    split: str,
    counts: Mapping[str, int],
    task: str,
    figures: Iterable[tuple[str, float, str]],
) -> list[EvalResult]:
    """Return figures of a run, as (measure, value, title), for the Hub; `counts` says on how much of the split."""
    name, repository = (" ".join(printable(publishable(text)).split()) for text in data_names(settings))
    data: dict[str, Any] = {
        "dataset_type": repository,
        "dataset_name": name,
        "dataset_split": split,
        "dataset_args": dict(counts),
    }
    return [
        EvalResult(task_type=task, metric_type=measure, metric_value=round(value, 4), metric_name=title, **data)
        for measure, value, title in figures
    ]


def data_names(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and repository of the data of a run; the latter is a word of its own where the Hub has none."""
    given = settings.get("dataset_name") or settings.get("train_file")
    if given and given == settings.get("dataset_name") and is_on_hub(given):
        return given, given
    name = (
        "/".join(Path(given).parts[-2:]) if given and not is_embedded(given) else f"The embedded {given or 'scenes'}"
    )
    return name, re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-").lower()


def model_title(name: str) -> str:
    """Return a model's name for people: that on the Hub, or the last two parts of a path."""
    return "/".join(Path(name).absolute().parts[-2:]) if Path(name).exists() else name


def is_on_hub(dataset_name: str) -> bool:
    """Return whether --dataset_name means a data set on the Hub."""
    return not is_embedded(dataset_name) and not Path(dataset_name).exists()


def retrieval_results(
    metrics: Mapping[str, float], settings: Mapping[str, Any], counts: Mapping[str, int], medium: str
) -> list[EvalResult]:
    """Return both directions' recall on the validation split, and re-ranked ones."""
    figures = [
        (f"recall@{k}", metrics[name], f"recall@{k}, {title.replace('image', medium)}, {stage}")
        for direction, title in DIRECTIONS.items()
        for prefix, stage in MEASURED.items()
        for k in CUTOFFS
        if (name := f"{prefix}{direction}_recall@{k}") in metrics
    ]
    return eval_results(settings, "validation", counts, f"{COLUMNS[medium]}-text-retrieval", figures)


EXAMPLES = {  # of code: the folder of a person's files, which files, and a text
    "image": ("pictures", "*.jpg", "something red"),
    "clip": ("clips", "*.mp4", "something turns red"),  # pip install av
    "sound": ("sounds", "*.wav", "a low tone"),
}
_LIBRARIES = ("torch", "transformers", "accelerate", "datasets")


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a result depends on."""
    return {"python": platform.python_version(), **{library: version(library) for library in _LIBRARIES}}


@dataclass
class CardInfo:
    """The content of a model card; secrets in it are redacted when it is written.

    Attributes:
        medium: the kind of media, of `mm_utils.data.media.COLUMNS`.
        model: what `from_pretrained` takes: the absolute path of the folder, or the repository on the Hub.
        table, table_note: titles and rows of the results, and a sentence below them.
        metrics: all metrics by name.
        pipeline_tag: a pipeline that takes the model; None if there is none.
        usage: returns the code that uses the model, by its quoted name and its medium; None for a model of retrieval.
        results: what was measured, for the Hub.
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
    frozen: tuple[bool, ...] = (False, False)  # whether the encoder of the medium, and that of texts, was not trained
    num_trained: int = 0
    terms: list[str] = field(default_factory=lambda: ["contrastive"])  # of the loss
    pipeline_tag: str | None = "feature-extraction"
    tags: tuple[str, ...] = ()
    summary: str | None = None
    usage: Callable[[str, str], str] | None = None
    results: list[EvalResult] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    base_models: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=library_versions)


def write_model_card(output_dir: Path, card: CardInfo) -> Path:
    """Write ``README.md`` into `output_dir`, with the pictures that exist; return its path."""
    titles, rows = card.table
    metrics = [[_code(name), f"{value:.4g}"] for name, value in card.metrics.items() if not name.endswith("_spread")]
    setting = {"hardware": card.hardware, "precision": card.precision, "processes": card.num_processes}
    hyperparameters = without_secrets(card.hyperparameters, publishable)
    pictures = {"Training curves": "training.png", "Retrieved {}s": "retrieval.png"}
    name = json.dumps(card.model, ensure_ascii=False)
    # Code runs as pasted, in any folder.
    usage = _fenced("python", card.usage(name, card.medium) if card.usage else _search_code(name, card))
    parts = [
        f"---\n{_front_matter(card).to_yaml()}\n---",
        f"# {_text(card.name)}",
        _what_it_is(card),
        "## Use",
        usage,
        "## Results",
        markdown_table(list(map(_text, titles)), [list(map(_text, row)) for row in rows]),
        *([card.table_note] if card.table_note else []),
        _details("All metrics", markdown_table(["metric", "value"], metrics)),
        *(
            f"![{title.format(card.medium)}]({name})"
            for title, name in pictures.items()
            if (output_dir / name).is_file()
        ),
        "## Data",
        f"{_text(card.dataset_name)}, fingerprint {_code(card.dataset_fingerprint)}.",
        markdown_table(["split", "rows"], [[_text(split), f"{rows:,}"] for split, rows in card.dataset_rows.items()]),
        "## Training",
        _fenced("bash", card.command),
        markdown_table(["setting", "value"], [[_text(k), _text(v)] for k, v in {**setting, **card.versions}.items()]),
        _details(
            "Arguments that differ from the defaults",
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


def _what_it_is(card: CardInfo) -> str:
    """Return what was trained, from what, by which terms, and what it does."""
    names = (f"{card.medium} encoder ({_text(card.vision_model)})", f"text encoder ({_text(card.text_model)})")
    image, text = (f"a frozen {name}" if frozen else an(name) for name, frozen in zip(names, card.frozen, strict=True))
    size, trained = (f"{count / 1e6:,.1f} million" for count in (card.num_parameters, card.num_trained))
    size = f"{size} parameters in all{f', of which {trained} were trained' if any(card.frozen) else ''}"
    both = f"{image[0].upper()}{image[1:]} and {text}"
    if card.summary is not None:
        return f"{_text(card.summary)} {both}: {size}."
    head = ", and a cross-attention fusion head that re-ranks the best candidates" if card.has_fusion else ""
    losses = f"the {listed([_text(term) for term in card.terms])} loss{'es' * (len(card.terms) > 1)}"
    found = f"It finds {card.medium}s for a text and texts for {an(card.medium)}."
    made = "joined" if all(card.frozen) else "trained together"
    return f"{both}, {made} with {losses}{head}: {size}. {found}"


def listed(words: Sequence[str]) -> str:
    """Return words with commas and an "and"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def an(medium: str) -> str:
    """Return a medium, or words that begin with it, with their article."""
    return f"an {medium}" if medium.startswith("image") else f"a {medium}"


def _front_matter(card: CardInfo) -> ModelCardData:
    def known(values: list[str]) -> list[str] | None:
        return [" ".join(printable(value).split()) for value in values] or None

    medium = COLUMNS[card.medium]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=card.pipeline_tag,
        tags=[
            *(card.tags or (f"{medium}-text-retrieval", *RETRIEVAL_TAGS)),
            *[medium] * (medium != "image"),
            "custom_code",
        ],
        base_model=known(card.base_models),
        datasets=known(card.datasets),
        metrics=list(dict.fromkeys(result.metric_type for result in card.results)) or None,
        model_name=" ".join(printable(card.name).split()) if card.results else None,
        eval_results=card.results or None,
    )


def _search_code(name: str, card: CardInfo) -> str:
    stock = f", {card.dual_encoder}" if card.dual_encoder else ""
    medium, (media, files, text) = card.medium, EXAMPLES[card.medium]
    code = f"""\
from pathlib import Path

from transformers import AutoModel{stock}

folder = {name}
model = AutoModel.from_pretrained(folder, trust_remote_code=True)  # its code comes with it

# Embed your own {media} and a text: vectors of length 1.
{media} = sorted(Path("{media}").glob("{files}"))
{medium}_embeds, text_embeds = model.encode({medium}s={media}, texts=["{text}"])

# Search: the cosine of the text with every {media[:-1]}, the best first.
cosine = model.similarity(text_embeds, {medium}_embeds)[0]
for place in cosine.argsort(descending=True)[:5].tolist():
    print(f"{{cosine[place]:.3f}}  {{{media}[place]}}")"""
    if card.has_fusion:
        code += f"""

# Re-rank: the fusion head reads the text and each of the best {media} together.
print("re-ranked:", [{media}[place].name for place, score in model.rerank("{text}", {media})])"""
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
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text or not text else f"`{text}`"


def _fenced(language: str, text: str) -> str:
    text = printable(redact(text))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
