"""Benchmarks by name: where their data are, and what their protocol is.

`benchmarks.yaml` is the table.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torchvision.models import ResNet50_Weights

from mm_utils.data.rows.media_folders import WORDNET_ID
from mm_utils.data.rows.source import Source, close_to
from mm_utils.stored import place_of
from mm_utils.text import one_line


@dataclass(frozen=True)
class Benchmark:
    """A data set with a protocol.

    Attributes:
        name: its key in the table.
        dataset: its repository on the Hub.
        files: pattern of the files of the repository that hold the images to evaluate.
        split: their split.
        images: their number.
        classes: names of the classes for prompts, in the order of the labels; none for retrieval.
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


def find_benchmark(known: dict[str, Benchmark], name: str, title: str) -> Benchmark:
    """Return a benchmark by its name.

    Raises:
        ValueError: begun by `title`, if there is none.
    """
    if name not in known:
        raise ValueError(f"{title}. Known are {', '.join(known)}.{close_to(name, known)}")
    return known[name]


def fetch(benchmark: Benchmark, title: str, everything: bool = False) -> str:
    """Bring a benchmark's files from the Hub into the cache, once; return their folder.

    Args:
        title: begins messages.
        everything: also the other splits.

    Raises:
        ValueError: if that fails.
    """
    # `huggingface_hub` checks what lies there, and goes on where it stopped
    folder = place_of("benchmarks", benchmark.name)
    files = None if everything else [benchmark.files, "*.txt"]
    advice = f"Check the connection and your access to {benchmark.dataset}, or give a local folder of it."
    try:
        snapshot_download(benchmark.dataset, repo_type="dataset", local_dir=folder, allow_patterns=files)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(f"{title}; {benchmark.dataset} could not be fetched ({one_line(error)}). {advice}") from error
    if not any(folder.glob(benchmark.files if "/" in benchmark.files else f"**/{benchmark.files}")):
        raise ValueError(f"{title}; {benchmark.dataset} has no files {benchmark.files}. {advice}")
    return str(folder)


def resolved(source: Source) -> Source:
    """Return the source of the data that a benchmark's name stands for; others as they are."""
    if source.path not in RETRIEVAL or os.path.exists(source.path):
        return source
    folder = fetch(RETRIEVAL[source.path], source.title, everything=True)
    return replace(source, path=folder, format="webdataset")


def _benchmark(name: str, renamed: dict[int, str] | None = None, **entry: Any) -> Benchmark:
    entry |= {key: tuple(entry.get(key, ())) for key in ("classes", "names", "templates")}
    if renamed is not None:
        entry["names"] = tuple(ResNet50_Weights.IMAGENET1K_V2.meta["categories"])
        entry["classes"] = tuple(renamed.get(place, name) for place, name in enumerate(entry["names"]))
    return Benchmark(name, **entry | {"names": entry["names"] or entry["classes"]})


def _folded(name: str) -> str:
    return re.sub(r"[\W_]", "", name.split(",")[0]).lower()


_TABLE = yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8"))
CLASSIFICATION, RETRIEVAL = (
    {name: _benchmark(name, **entry) for name, entry in _TABLE[kind].items()}
    for kind in ("classification", "retrieval")
)
