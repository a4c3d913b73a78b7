"""Benchmarks of classification by name: their classes and prompts, and where their data are.

`benchmarks.yaml` is the table.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torchvision.models import ResNet50_Weights

from mm_utils.data.rows.media_folders import WORDNET_ID


@dataclass(frozen=True)
class Benchmark:
    """A data set with a protocol.

    Attributes:
        name: its key in the table.
        dataset: its repository on the Hub.
        files: pattern of the files of the repository that hold the images to evaluate.
        split: their split.
        images: their number.
        classes: names of the classes for prompts, in the order of the labels.
        names: what the data set itself calls the classes.
        templates: prompts with ``{}`` in place of the class's name.
    """

    name: str
    dataset: str
    files: str
    split: str
    images: int
    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    @property
    def download(self) -> str:
        """The command that brings the images to evaluate from the Hub, in a sentence."""
        folder = f"data/{self.name}"
        command = (
            f"hf download {self.dataset} --repo-type dataset --include '{self.files}' '*.txt' --local-dir {folder}"
        )
        return f"Run {command}, then give --dataset_name {folder}."

    def places(self, known: Sequence[str], title: str) -> list[int]:
        """Return the class of each label that a data set names, by number where it names none.

        Names count without case, spaces, punctuation and synonyms after a comma. Where 95 % of them come in the same order, the
        others, such as ImageNet's two cranes, do not matter; nor do WordNet ids, whose order is that of ImageNet's labels.

        Raises:
            ValueError: begun by `title`, if they are not these classes.
        """
        own, found = [_folded(name) for name in self.names], [_folded(name) for name in known]
        same = sum(one == other for one, other in zip(own, found, strict=False))
        coded = list(known) == sorted(known) and all(map(WORDNET_ID.fullmatch, known))
        in_order = len(found) == len(own) and (same >= 0.95 * len(own) or (coded and self.name == "imagenet1k"))
        if in_order or not known:
            return list(range(len(own)))
        place_of = {name: place for place, name in enumerate(own)}
        if not set(found) <= place_of.keys():
            raise ValueError(
                f"{title}; its {len(known):,} classes ({', '.join(known[:3])}, ...) are not the {len(own):,} of {self.name} "
                f"({', '.join(self.names[:3])}, ...). Give other data, or a file of names as --classes."
            )
        return [place_of[name] for name in found]


def _benchmark(name: str, renamed: dict[int, str] | None = None, **entry: Any) -> Benchmark:
    entry |= {key: tuple(entry.get(key, ())) for key in ("classes", "names", "templates")}
    if renamed is not None:
        entry["names"] = tuple(ResNet50_Weights.IMAGENET1K_V2.meta["categories"])
        entry["classes"] = tuple(renamed.get(place, name) for place, name in enumerate(entry["names"]))
    return Benchmark(name, **entry | {"names": entry["names"] or entry["classes"]})


def _folded(name: str) -> str:
    return re.sub(r"[\W_]", "", name.split(",")[0]).lower()


_TABLE = yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8"))
BENCHMARKS = {name: _benchmark(name, **entry) for name, entry in _TABLE.items()}
