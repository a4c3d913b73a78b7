"""Open several data sets, each of its own medium, as one run's data; a step has one.

Texts are what media have in common: each has a tower of its own, and the text tower is trained in every step. In the steps of
others a tower is frozen: it has no gradient, so that neither weight decay nor momentum moves it, on any number of processes.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.dataset import Batch
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.media import MEDIA, kind_of
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.training_data import Schedule, Share, TrainingData, open_data
from mm_utils.extras.several_media.flags import MediaArguments
from mm_utils.extras.several_media.turns import Turns
from mm_utils.model.modeling_fusion_dual_encoder import MEDIA_FOLDER

logger = logging.getLogger(__name__)

SCENES = "scenes"  # the data set without a name, among others


@dataclass
class Mixture(TrainingData):
    """The data of several media; `splits`, `processor` and the like are those of the first.

    Attributes:
        parts: the data of each medium.
        turns: which medium a step has.
    """

    parts: dict[str, TrainingData] = field(default_factory=dict)
    turns: Turns = field(default_factory=lambda: Turns({"image": 1, "sound": 1}))

    @property
    def media(self) -> dict[str, TrainingData]:
        """The data of each medium."""
        return self.parts

    @property
    def num_rows(self) -> int:
        """Number of training rows of all media."""
        return sum(part.num_rows for part in self.parts.values())

    def train_batches(self, start: int, stop: int) -> "Interleaved":  # type: ignore[override]
        """Return this rank's share of the global batches of steps `start` to `stop`."""
        return Interleaved(self.parts, self.turns, start, stop)

    def shares(self, run: Any, metrics: dict[str, float]) -> list[Share]:
        """Return what the run has learnt of each medium; all but the first have a folder in `media/`."""
        towers = (run.settings["vision_model_name_or_path"] or "").split(",")
        between = {name: value for name, value in metrics.items() if name.startswith("eval_between_")}
        found = []
        for at, (medium, part) in enumerate(self.parts.items()):
            own = {"dataset_name": part.name, "vision_model_name_or_path": towers[at % len(towers)].strip() or None}
            folder = run.output_dir / MEDIA_FOLDER / medium if at else run.output_dir
            prefix = f"eval_{medium}_"
            figures = {
                f"eval_{name.removeprefix(prefix)}": v for name, v in metrics.items() if name.startswith(prefix)
            }
            others = " and ".join(f"{other}s" for other in self.parts if other != medium)
            where = "the folder above" if at else f"`{MEDIA_FOLDER}/`"
            remark = f" The same run trained a tower for {others}, on this text encoder: see {where}."
            own_run = replace(run, output_dir=folder, settings={**run.settings, **own})
            found.append(Share(own_run, part, figures | between, remark))
        return found

    def __str__(self) -> str:
        return "; ".join(map(str, self.parts.values())) + f"; of {self.turns.period} steps: {self.turns}"


class Interleaved:
    """The batches of steps `start` to `stop`, each of one medium, whose name is its `medium`.

    Attributes:
        wait: seconds that the caller waited for the last batch.
    """

    def __init__(self, parts: dict[str, TrainingData], turns: Turns, start: int, stop: int):
        self.turns, self.steps, self.wait = turns, range(start, stop), 0.0
        self.loaders = {
            medium: part.train_batches(turns.before(medium, start), turns.before(medium, stop))
            for medium, part in parts.items()
        }

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Batch]:
        batches = {medium: iter(loader) for medium, loader in self.loaders.items()}
        for step in self.steps:
            medium = self.turns.medium(step)
            batch = next(batches[medium], None)
            if batch is None:
                return
            self.wait = self.loaders[medium].wait
            yield {**batch, "medium": medium}


def open_media(
    accelerator: Accelerator,
    data_args: DataArguments,
    media_args: MediaArguments,
    loader_args: LoaderArguments,
    schedule: Schedule,
    make_processor: Callable[..., ProcessorMixin],
    readers: Sequence[ColumnReader] = (),
) -> Mixture:
    """Open the data sets that the arguments name, each of its own medium.

    The tokenizer is one of the training captions of all. Data workers are shared out.

    Args:
        make_processor: as of `open_data`, and also given `at`, the place of the data set, from 0.

    Raises:
        ValueError: as `open_data`, or if two data sets are of one medium.
    """
    names = media_args.names(data_args.dataset_name)
    of_names = [
        replace(data_args, dataset_name=None if name == SCENES and not Path(name).exists() else name) for name in names
    ]
    with distributed.first_then_others():
        rows = [load_pairs(args)["train"] for args in of_names]
    media = [kind_of(each.features) for each in rows]
    if twice := [medium for medium in media if media.count(medium) > 1]:
        raise ValueError(
            f"--dataset_name is {data_args.dataset_name}; more than one of them are {twice[0]}s. Join those with "
            "scripts/prepare_data.py --sources, and name one data set of each medium."
        )
    shares = dict(zip(media, media_args.shares(list(map(len, rows))), strict=True))
    turns = Turns(shares)

    def processor_of(_: Iterator[str], **timed: Any) -> ProcessorMixin:
        return make_processor(chain.from_iterable(map(iterate_captions, rows)), **timed)

    parts = {}
    for at, (medium, args) in enumerate(zip(media, of_names, strict=True)):
        workers = loader_args.num_workers and max(1, loader_args.num_workers * shares[medium] // sum(shares.values()))
        sizes, eval_size = turns.batch_sizes(medium, schedule.batch_sizes), schedule.per_device_eval_batch_size
        own: Any = SimpleNamespace(seed=schedule.seed, per_device_eval_batch_size=eval_size, batch_sizes=sizes)
        own.fit_batch = lambda _: None  # the batch of the run is not a medium's own
        unused = {flag: getattr(LoaderArguments, flag) for flag in MEDIA[medium].unused}
        loading = replace(loader_args, dataloader_num_workers=str(workers), **unused)
        make = partial(processor_of, at=at)
        parts[medium] = open_data(accelerator, args, loading, own, make, readers)
        parts[medium].name = args.dataset_name
    return join_media(parts, turns)


def join_media(parts: dict[str, TrainingData], turns: Turns) -> Mixture:
    """Return the data of several media as those of one run."""
    first = next(iter(parts.values()))
    shared = {each.name: getattr(first, each.name) for each in fields(TrainingData)}
    shared["identity"] = {
        "data": "+".join(part.fingerprint for part in parts.values()),
        "media": str(turns),
        **{f"{name} of {medium}s": value for medium, part in parts.items() for name, value in part.identity.items()},
    }
    shared["total_rows"] = {**first.total_rows, "train": sum(part.total_rows["train"] for part in parts.values())}
    found = Mixture(**shared, parts=parts, turns=turns)
    logger.info("%s", found)
    return found
