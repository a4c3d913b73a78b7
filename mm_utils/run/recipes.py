"""The start of a run on pairs of one's own whose command names none: a recipe, by what the pairs hold."""

import logging
from itertools import islice
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache

from mm_utils.arguments import Parsed, read_flat_yaml
from mm_utils.command import scripts_folder
from mm_utils.data.media import kind_of
from mm_utils.data.pairs import sources_of
from mm_utils.data.prepare.on_disk import is_prepared, open_prepared
from mm_utils.data.rows.detect import read_rows
from mm_utils.data.rows.records import Record
from mm_utils.data.rows.source import DataArguments, PathArguments, Source
from mm_utils.places import missing, use_cache_without_network
from mm_utils.text import one_line

logger = logging.getLogger(__name__)
STARTS = ("model_name_or_path", "vision_model_name_or_path", "text_model_name_or_path", "vision_config", "text_config")
"""Flags that say what a run starts from."""
FIRST_ROWS = 100  # that are looked at
_FOLDER = scripts_folder().parent / "recipes"
_RECIPES = {"image": "photographs", "clip": "photographs", "sound": "sounds", "stream": "clip"}
_ABOUT = {
    "photographs": "a frozen image encoder and a frozen text encoder, joined in minutes on a laptop",
    "sounds": "a stock CLAP, trained further with small rates",
    "clip": "a stock CLIP, trained further with small rates",
}


def recipe_for(given: Parsed) -> str | None:
    """Return the file of flags that a run takes its start from; None if the command names a start, or no data of one's own.

    Raises:
        ValueError: if the data, or a model that the recipe names, are neither on this machine nor to be had.
    """
    data = given[DataArguments]
    if given.is_given(*STARTS) or not (sources := sources_of(data)):
        return None
    if problem := missing(sources[0].path):
        raise ValueError(f"{sources[0].title}; {problem}")
    medium = "stream" if given["streaming"] else _medium(data, sources[0])
    path = _FOLDER / f"{_RECIPES[medium]}.yaml"
    starts = {flag: str(entry.value) for flag, entry in read_flat_yaml(str(path)).items() if flag in STARTS}
    folders = " ".join(f"--{flag} FOLDER" for flag in starts)
    for name in starts.values():
        if error := _unreachable(name):
            raise ValueError(
                f"{sources[0].title}, and no start is named, so {path} applies; it takes {name}, which is not on this machine, and "
                f"the Hub cannot be reached ({error}). Give --config {path} {folders}, or --vision_config small --text_config "
                "small to train from scratch."
            )
    return str(path)


def announce(recipe: str) -> None:
    """Log what a run starts from, and what else it could."""
    logger.info(
        "No start is named, so this run takes %s: %s. Others: --config %s trains a CLIP further, and --vision_config small "
        "--text_config small trains from scratch, which takes 100,000 pairs and more",
        recipe,
        _ABOUT[Path(recipe).stem],
        _FOLDER / "clip.yaml",
    )


def _medium(data: DataArguments, source: Source) -> str:
    """Return what the first rows on this machine hold."""
    if not Path(source.path).exists():
        return "image"
    if is_prepared(source.path):
        splits = open_prepared(source.path, source.title, allow_outside=data.allow_outside_root)
        return kind_of(next(iter(splits.values())).features)  # that there is no train split is said where it is read
    rows = islice(read_rows(source, PathArguments(data.image_root, data.allow_outside_root)), FIRST_ROWS)
    return next((row.medium for row in rows if isinstance(row, Record)), "image")


def _unreachable(name: str) -> str:
    """Return why a model is neither on this machine nor to be had; else ""."""
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ""
    use_cache_without_network()
    try:
        HfApi().model_info(name, timeout=10)
        return ""
    except Exception as error:  # of any HTTP library
        return one_line(error)
