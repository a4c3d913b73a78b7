"""Write the model card: training data, results, settings, and how to load the model."""

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mm_utils.data.media import COLUMNS
from mm_utils.files import optional_file
from mm_utils.text import markdown_table, markdown_text, printable, publishable, redact, without_secrets

EXAMPLES = {  # of code: what a person's files are called, and which files
    "image": ("pictures", "*.jpg"),
    "clip": ("clips", "*.mp4"),  # pip install av
    "sound": ("sounds", "*.wav"),
}
_LIBRARIES = ("torch", "transformers", "accelerate", "datasets")


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a result depends on."""
    return {"python": platform.python_version(), **{library: version(library) for library in _LIBRARIES}}


@dataclass
class CardInfo:
    """The content of a model card; secrets in it are redacted when it is written.

    Attributes:
        about: a sentence on what the model is, in Markdown.
        usage: code that uses the model.
        medium: the kind of media, of `mm_utils.data.media.COLUMNS`.
        table, table_note: titles and rows of the results, and a sentence below them.
        metrics: all metrics by name.
        environment: the hardware, the precision and the number of processes.
        hyperparameters: the arguments that were given or differ from their defaults.
        limits: a sentence on what its scores are not.
        pipeline_tag: a pipeline that takes the model; None if there is none.
        datasets, base_models: the training data, and what training started from, on the Hub.
    """

    name: str
    about: str
    usage: str
    medium: str
    table: tuple[list[str], list[list[str]]]
    table_note: str
    metrics: dict[str, float]
    dataset_name: str
    dataset_rows: dict[str, int]
    dataset_fingerprint: str
    command: str
    environment: dict[str, Any]
    hyperparameters: dict[str, Any]
    tags: tuple[str, ...]
    limits: str
    pipeline_tag: str | None
    datasets: list[str]
    base_models: list[str]


def write_model_card(output_dir: Path, card: CardInfo) -> Path:
    """Write ``README.md`` into `output_dir`, with the pictures that exist; return its path."""
    titles, rows = card.table
    metrics = [
        [_code(name.replace("image", card.medium)), f"{value:.4g}"]
        for name, value in card.metrics.items()
        if not name.endswith("_spread")
    ]
    hyperparameters = without_secrets(card.hyperparameters, publishable)
    pictures = {"Training curves": "training.png", "Retrieved {}s": "retrieval.png"}
    parts = [
        f"---\n{_front_matter(card).to_yaml()}\n---",
        f"# {_text(card.name)}",
        card.about,
        "## Use",
        _fenced("python", card.usage),
        "## Results",
        markdown_table(list(map(_text, titles)), [list(map(_text, row)) for row in rows]),
        card.table_note,
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
        markdown_table(
            ["setting", "value"], [[_text(k), _text(v)] for k, v in {**card.environment, **library_versions()}.items()]
        ),
        _details(
            "Arguments that were given or differ from the defaults",
            markdown_table(["name", "value"], [[_code(k), _code(v)] for k, v in hyperparameters.items()]),
        ),
        "## Limitations",
        f"The model knows only what its training pairs show, their language and their biases included. {card.limits} "
        "Measure it on your own data before relying on it.",
    ]
    path = output_dir / "README.md"
    shown = "\n\n".join(publishable(part) for part in parts if part)
    with optional_file(path):
        path.write_text(f"{shown}\n", encoding="utf-8")
    return path


def encoder(medium: str, name: str, is_frozen: bool) -> str:
    """Return what the encoder of a medium, or of texts, is, in Markdown."""
    what = f"{medium} encoder ({_text(name)})"
    return f"a frozen {what}" if is_frozen else an(what)


def millions(count: int) -> str:
    """Return a number of parameters for people."""
    return f"{count / 1e6:,.1f} million"


def listed(words: Sequence[str]) -> str:
    """Return words with commas and an "and"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))  # a, b and c


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
        tags=[*card.tags, *[medium] * (medium != "image"), "custom_code"],
        base_model=known(card.base_models),
        datasets=known(card.datasets),
    )


def quoted(name: str) -> str:
    """Return a name as Python code has it."""
    return json.dumps(name, ensure_ascii=False)


def search_code(name: str, medium: str, has_fusion: bool, dual_encoder: str, text: str) -> str:
    """Return code that searches; it runs as pasted where the model's name leads to it.

    Args:
        name: the model: its folder, or its repository on the Hub.
        dual_encoder: the class in the folder `dual_encoder/`, "" without one.
        text: what is searched for.
    """
    stock = f", AutoProcessor, {dual_encoder}" if dual_encoder else ""
    media, files = EXAMPLES[medium]
    code = f"""\
from pathlib import Path

from transformers import AutoModel{stock}

folder = {quoted(name)}  # where this card lies, or a name of the Hub
model = AutoModel.from_pretrained(folder, trust_remote_code=True)  # its code comes with it

# Embed your own {media} and a text: vectors of length 1.
{media} = sorted(Path("my_{media}").glob("{files}"))
{medium}_embeds, text_embeds = model.encode({medium}s={media}, texts=[{quoted(text)}])

# Search: the cosine of the text with every {media[:-1]}, the best first.
cosine = model.similarity(text_embeds, {medium}_embeds)[0]
for place in cosine.argsort(descending=True)[:5].tolist():
    print(f"{{cosine[place]:.3f}}  {{{media}[place]}}")"""
    if has_fusion:
        code += f"""

# Re-rank: the fusion head reads the text and each of the best {media} together.
print("re-ranked:", [{media}[place].name for place, score in model.rerank({quoted(text)}, {media})])"""
    if dual_encoder:
        code += f"""

# The two encoders alone, with the class that transformers ships. Texts are cut where training did.
dual_encoder = {dual_encoder}.from_pretrained(folder, subfolder="dual_encoder")
processor = AutoProcessor.from_pretrained(folder, subfolder="dual_encoder")
tokens = processor(text=[{quoted(text)}], padding="max_length", truncation=True, return_tensors="pt")
text_features = dual_encoder.get_text_features(**tokens)  # of any length; transformers 5 has them as .pooler_output"""
    return code


def _details(title: str, text: str) -> str:
    """Fold a long text."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _text(value: object) -> str:
    return markdown_text(publishable(str(value)))


def _code(value: object) -> str:
    """Format a code span for a table; its fence is longer than any run of backticks inside."""
    text = " ".join(printable(publishable(str(value))).split()).replace("|", r"\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))  # a ` inside takes a fence of ``
    return f"{fence} {text} {fence}" if "`" in text or not text else f"`{text}`"


def _fenced(language: str, text: str) -> str:
    text = printable(redact(text))
    # ``` in the text takes a fence of four
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
