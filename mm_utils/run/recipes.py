"""What a run on pairs of one's own starts from: a recipe, by the start that the command names and by what the pairs hold."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, try_to_load_from_cache

from mm_utils.arguments import Parsed, parse_args, read_flat_yaml
from mm_utils.command import scripts_folder
from mm_utils.data.arguments import DataArguments
from mm_utils.data.media import kind_of
from mm_utils.data.pairs import sources_of
from mm_utils.data.prepare.on_disk import is_prepared, open_prepared
from mm_utils.data.rows.detect import read_rows
from mm_utils.data.rows.records import Record
from mm_utils.data.rows.source import Source
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.model.build import check_model
from mm_utils.objectives.build import term_class
from mm_utils.places import missing, use_cache_without_network
from mm_utils.text import one_line

logger = logging.getLogger(__name__)
MODELS = ("model_name_or_path", "vision_model_name_or_path", "text_model_name_or_path")
STARTS = (*MODELS, "vision_config", "text_config")
"""Flags that say what a run starts from."""
FIRST_ROWS = 100  # that are looked at
_FOLDER = scripts_folder().parent / "recipes"
_UNNAMED = {"image": "photographs", "clip": "photographs", "sound": "sounds", "stream": "clip"}
_GIVES_WAY = {  # what a recipe does not set where the command has a flag that would contradict it
    "fusion_layers": {"objectives"},
    "max_steps": {"num_train_epochs"},
    "streaming": {"cache_features"},
    "min_crop_area": {"cache_features"},
    "horizontal_flip": {"cache_features"},
    "lora_rank": {"freeze_vision", "freeze_text", "cache_features", "backbone_learning_rate"},
}
_FOREIGN_LETTERS = 0.05  # share of letters beyond a to z; of English captions below 0.001, of Vietnamese ones 0.3
_ENGLISH = "the a of and with is are on at to an"
_OTHERS = (  # of German, French, Spanish, Portuguese, Italian, Dutch, Indonesian
    "ein eine einen einem einer der die das und mit auf im un une le la les de du et dans avec sur una el los las con en y di il e "
    "um uma com do da van het een op met dan dengan yang"
)


@dataclass(frozen=True)
class Recipe:
    """A file of flags that stands behind those of the command.

    Attributes:
        path: the file; None where a run takes none.
        without: names of flags that are not taken from it.
        reason: the beginning of the line that says so, such as "No start is named".
    """

    path: str | None = None
    without: frozenset[str] = frozenset()
    reason: str = ""

    def announce(self) -> None:
        """Log what a run starts from and what is set."""
        if self.path is None:
            if self.reason:
                logger.info(
                    "%s, so no recipe is taken: the encoders are trained, by the flags and their defaults", self.reason
                )
            return
        entries = read_flat_yaml(self.path).items()
        sets = ", ".join(f"{name} {entry.value}" for name, entry in entries if name not in self.without)
        logger.info(
            "%s, so this run takes %s: %s. Flags of the command come before these", self.reason, self.path, sets
        )


def recipe_for(given: Parsed) -> Recipe:
    """Return the flags that a run takes besides those of its command, if its pairs are one's own.

    A start in the file of `--config`, and a backbone from scratch, ask for no recipe.

    Raises:
        ValueError: if the data, or a model that the recipe names, are neither on this machine nor to be had.
    """
    data = given[DataArguments]
    if given.is_given("vision_config", "text_config") or not given.in_config.isdisjoint(STARTS):
        return Recipe()
    if not (sources := sources_of(data)):
        return Recipe()
    source = sources[0]
    if problem := missing(source.path):
        raise ValueError(f"{source.title}; {problem}")
    medium, captions = ("stream", []) if given["streaming"] else _first_rows(data, source)
    name, reason = _choose(given, medium, captions)
    if name is None:
        return Recipe(reason=reason)
    recipe = Recipe(str(_FOLDER / f"{name}.yaml"), _without(given), reason)
    _check_models(recipe, source.title)
    return recipe


def parse_with_recipe(*kinds: Any, argv: Sequence[str] | None, doc: str | None) -> tuple[Parsed, Recipe]:
    """Parse the arguments of a run, with the recipe of pairs of one's own, by the start that is named."""
    given = parse_args(*kinds, argv=argv, doc=doc)
    recipe = recipe_for(given)
    if recipe.path:
        given = parse_args(*kinds, argv=argv, doc=doc, recipe=recipe.path, without=recipe.without)
    return given, recipe


def _choose(given: Parsed, medium: str, captions: list[str]) -> tuple[str | None, str]:
    """Return the name of the recipe, None without one, and the reason."""
    whole = given["model_name_or_path"]
    vision = given["vision_model_name_or_path"]
    text = given["text_model_name_or_path"]
    are_frozen = given["freeze_vision"] and given["freeze_text"]
    if vision or text:
        other = [f"--{name}" for name in ("freeze_vision", "freeze_text", "lora_rank") if given.is_given(name)]
        if not (vision and text):  # the other tower is from scratch, or that of a whole model
            return None, ""
        if other and not are_frozen:
            return None, f"Two encoders are named, and {' and '.join(other)}"
        return "two_encoders", "Two encoders are named"
    if whole:
        if getattr(check_model(whole), "fusion_layers", 0):
            return None, ""  # an earlier run with a head goes on as it was
        if are_frozen:
            return (
                (None, "")
                if medium == "sound"
                else ("photographs", "A whole model is named, and both its towers are frozen")
            )
        return "sounds" if medium == "sound" else "clip", "A whole model is named"
    if medium in ("image", "clip") and not is_english(captions):
        return "multilingual", "No start is named, and most captions are not English"
    return _UNNAMED[medium], "No start is named"


def _without(given: Parsed) -> frozenset[str]:
    """Return the flags that a recipe does not set beside those that are given."""
    names = set(STARTS) if given.is_given(*STARTS) else set[str]()
    for flag, others in _GIVES_WAY.items():
        if given.is_given(flag) and given[flag]:
            names |= others
    terms = given[ObjectiveArguments].weights if given.is_given("objectives") else ()
    if any(term_class(term).pairs_per_image or term == "regions" for term in terms):  # these need a fusion head
        names.add("fusion_layers")
    return frozenset(names)


def is_english(captions: list[str]) -> bool:
    """Return whether some captions are English rather than not, by their letters and their small words."""
    text = " ".join(captions).casefold()
    letters = [sign for sign in text if sign.isalpha()]
    if sum(not sign.isascii() for sign in letters) > _FOREIGN_LETTERS * len(letters):
        return False
    words = Counter(re.findall("[a-z]+", text))
    return sum(words[word] for word in _ENGLISH.split()) >= sum(words[word] for word in _OTHERS.split())


def _check_models(recipe: Recipe, title: str) -> None:
    """Raise ValueError if a model that a recipe names is not to be had."""
    entries = read_flat_yaml(str(recipe.path)).items()
    starts = {flag: str(entry.value) for flag, entry in entries if flag in STARTS and flag not in recipe.without}
    folders = " ".join(f"--{flag} FOLDER" for flag in starts)
    for name in starts.values():
        if error := _unreachable(name):
            raise ValueError(
                f"{title}. {recipe.reason}, so {recipe.path} applies.\n"
                f"It takes {name}, which is not on this machine, and the Hub cannot be reached ({error}).\n"
                f"Give a copy of it by {folders}, two encoders by --vision_model_name_or_path and --text_model_name_or_path, or "
                "--vision_config tiny --text_config tiny to train small ones from scratch."
            )


def _first_rows(data: DataArguments, source: Source) -> tuple[str, list[str]]:
    """Return the medium and the captions of the first rows on this machine."""
    if not Path(source.path).exists():
        return "image", []
    if is_prepared(source.path):
        splits = open_prepared(source.path, source.title, allow_outside=data.allow_outside_root)
        rows = next(iter(splits.values()))  # that there is no train split is said where it is read
        held = rows.select(range(min(FIRST_ROWS, len(rows)))).select_columns(["captions"])[:]["captions"]
        return kind_of(rows.features), [caption for captions in held for caption in captions]
    read = islice(read_rows(source), FIRST_ROWS)
    records = [row for row in read if isinstance(row, Record)]
    medium = records[0].medium if records else "image"
    return medium, [text for record in records for text in record.captions if isinstance(text, str)]


def _unreachable(name: str) -> str:
    """Return why a model is neither on this machine nor to be had; else ""."""
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ""
    use_cache_without_network()
    if constants.HF_HUB_OFFLINE:
        return "offline"
    try:
        HfApi().model_info(name, timeout=10)
        return ""
    except Exception as error:  # of any HTTP library
        return one_line(error)
