"""The model card: what was trained, on what, how well it does, and how to load it."""

import json
import platform
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from mm_utils.safe_text import printable, redact


@dataclass
class CardInfo:
    """What the model card says. Secrets in it are redacted when it is written."""

    name: str
    vision_model: str
    text_model: str
    num_parameters: int
    dataset_name: str
    dataset_rows: dict[str, int]
    dataset_fingerprint: str
    command: str
    metrics: dict[str, float]
    hyperparameters: dict[str, Any]
    hardware: str
    precision: str
    num_processes: int
    chance: dict[str, float] = field(default_factory=dict)
    repo_id: str | None = None
    has_fusion: bool = True
    has_dual_encoder: bool = True
    pipeline_tag: str = "zero-shot-image-classification"
    tags: tuple[str, ...] = ("image-text-retrieval", "dual-encoder", "contrastive-learning")
    summary: str | None = None
    auto_class: str = "AutoModel"
    base_models: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: library_versions())


def library_versions() -> dict[str, str]:
    """The versions of Python and of the libraries that a result depends on."""
    libraries = ("torch", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version(), **{library: version(library) for library in libraries}}


def write_model_card(output_dir: Path, card: CardInfo) -> Path:
    """Write ``README.md`` into `output_dir`, with the pictures that are there; returns its path."""
    front = {
        "library_name": "transformers",
        "pipeline_tag": card.pipeline_tag,
        "tags": [*card.tags, "custom_code"],
        **({"base_model": [printable(base) for base in card.base_models]} if card.base_models else {}),
    }
    fusion = ", and a cross-attention fusion head that re-ranks the best candidates" if card.has_fusion else ""
    results = [[_code(n), _value(v), _value(card.chance.get(n, "–"))] for n, v in card.metrics.items()]
    setting = {"hardware": card.hardware, "precision": card.precision, "processes": card.num_processes}
    pictures = {
        "Training curves": "training.png",
        "Retrieved images": "retrieval.png",
        "Confusions": "confusion.png",
        "Between the start and the end of fine-tuning": "wise_ft.png",
    }
    encoders = f"An image encoder ({_escape(card.vision_model)}) and a text encoder ({_escape(card.text_model)})"
    size = f"{card.num_parameters / 1e6:,.1f} million parameters in all"
    retrieval = (
        f"{encoders} trained together with a contrastive loss{fusion}: {size}. It finds images for a text and texts for an "
        "image."
    )
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {_escape(card.name)}",
        retrieval if card.summary is None else f"{_escape(card.summary)} {encoders}, {size}.",
        "## Use",
        _usage(card),
        "## Results",
        _table(["metric", "value", "chance"], results),
        *(f"![{title}]({name})" for title, name in pictures.items() if (output_dir / name).is_file()),
        "## Data",
        f"{_escape(card.dataset_name)}, fingerprint {_code(card.dataset_fingerprint)}.",
        _table(["split", "rows"], [[_escape(split), f"{rows:,}"] for split, rows in card.dataset_rows.items()]),
        "## Training",
        _fenced("bash", card.command),
        _table(["setting", "value"], [[_escape(k), _escape(v)] for k, v in {**setting, **card.versions}.items()]),
        "Hyper-parameters:",
        _table(["name", "value"], [[_code(k), _code(v)] for k, v in _redacted(card.hyperparameters)]),
        "## Limitations",
        "The model knows only what its training pairs show, their language and their biases included. Its scores rank "
        "candidates; they are no probabilities. Measure it on your own data before relying on it.",
    ]
    path = output_dir / "README.md"
    path.write_text(redact("\n\n".join(parts)) + "\n", encoding="utf-8")
    return path


def _usage(card: CardInfo) -> str:
    repo = json.dumps(card.repo_id or card.name, ensure_ascii=False)
    lines = [
        f"from transformers import AutoImageProcessor, {card.auto_class}, AutoTokenizer, VisionTextDualEncoderModel",
        "",
        "# The whole model; its code comes with it.",
        f"model = {card.auto_class}.from_pretrained({repo}, trust_remote_code=True)",
        f"tokenizer = AutoTokenizer.from_pretrained({repo})",
        f"image_processor = AutoImageProcessor.from_pretrained({repo})",
    ]
    if card.has_dual_encoder:
        lines += [
            "",
            "# The two encoders alone, with the class that transformers ships.",
            f'dual_encoder = VisionTextDualEncoderModel.from_pretrained({repo}, subfolder="dual_encoder")',
        ]
    else:
        lines[0] = lines[0].removesuffix(", VisionTextDualEncoderModel")
    return _fenced("python", "\n".join(lines))


def _redacted(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """The values, without those whose name says that they are secret."""
    secret = {name for name in values if redact(f"{name}=x") != f"{name}=x"}
    return [(name, "***" if name in secret and value is not None else value) for name, value in values.items()]


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    """A table in GitHub's Markdown, in which a bar is escaped even within code."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _escape(value: object) -> str:
    """Text on one line that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>{}|~$#!&])", r"\\\1", " ".join(printable(redact(str(value))).split()))


def _code(value: object) -> str:
    """A code span whose fence is longer than any run of backticks inside."""
    text = " ".join(printable(redact(str(value))).split()).replace("|", r"\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text or not text else f"`{text}`"


def _fenced(language: str, text: str) -> str:
    text = printable(redact(text))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
