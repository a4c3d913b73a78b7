"""What a checkpoint holds: copied from the training processes in one go, written later, given back to any number of them.

Every tensor is stored whole and by the name of its parameter, in safetensors files, and everything else as JSON: how many
processes there were, and whether their weights were sharded, leaves no trace, and nothing is unpickled. Random states are
not needed, as every step seeds its own.
"""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, ProcessorMixin, TrainerState

from mm_utils import adapters
from mm_utils.averaging import WeightAverage
from mm_utils.backends import with_scalars
from mm_utils.sharding import like, whole

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
RUN_FILE = "run.json"


@dataclass
class Snapshot:
    """A copy in the host's memory, with which training does not interfere.

    Attributes:
        model, processor: whose configuration is written.
        state: of the trainer.
        run: what else a resumed run wants to know, as JSON has it.
        weights: of the model, adapters included.
        tensors: file name -> tensors.
        folders: already on the same disk, and linked into the checkpoint.
    """

    model: PreTrainedModel
    processor: ProcessorMixin
    state: TrainerState
    run: dict[str, Any]
    weights: dict[str, Tensor]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """About what it takes on the disk."""
        tensors = [self.weights, *self.tensors.values()]
        return sum(value.nbytes for each in tensors for value in each.values())

    def not_finite(self) -> list[str]:
        """Names of weights with a NaN or an infinite value."""
        return [name for name, value in self.weights.items() if not torch.isfinite(value).all()]

    def write(self, folder: Path) -> None:
        """Write everything into a folder, as one that `from_pretrained` reads."""
        self.model.save_pretrained(folder, state_dict=adapters.merged(self.weights))
        adapters.save_adapters(self.weights, folder)
        self.processor.save_pretrained(folder)
        for name, tensors in self.tensors.items():
            save_file(tensors, folder / name)
        for source in self.folders:
            shutil.copytree(source, folder / source.name, copy_function=os.link)
        self.state.save_to_json(str(folder / STATE_FILE))
        (folder / RUN_FILE).write_text(json.dumps(self.run, indent=1) + "\n", encoding="utf-8")


Buffers = dict[str, Tensor]


def copied(tensors: Mapping[str, Tensor], main: bool, buffers: Buffers | None = None) -> dict[str, Tensor]:
    """Copies of whole tensors in the host's memory, on the main process; none elsewhere. All ranks must ask.

    Tensors that share their memory, as tied weights do, share that of the copy. `buffers` are what an earlier call with the same
    names has copied to: they are used again, as new memory takes longer to get than to fill. For a GPU they are pinned.
    """
    buffers = {} if buffers is None else buffers
    copies: dict[tuple[Any, ...], Tensor] = {}
    found = {}
    for name, value in tensors.items():
        complete = whole(value.detach())  # all ranks together, where it is sharded
        if main:
            key = (getattr(value, "_local_tensor", value).data_ptr(), value.shape, value.stride(), value.dtype)
            if key not in copies:
                copies[key] = buffers[name] = _buffer(buffers.get(name), complete).copy_(complete)
            found[name] = copies[key]
    return found


def _buffer(held: Tensor | None, value: Tensor) -> Tensor:
    if held is not None and held.shape == value.shape and held.dtype == value.dtype:
        return held
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)


def optimizer_tensors(optimizer: torch.optim.Optimizer, objective: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `parameter|key` -> tensor. Rates and decay come from the arguments."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in objective.named_parameters()}
    return {
        f"{names[parameter]}|{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, objective: nn.Module, folder: Path) -> None:
    """Give an optimizer the state that `optimizer_tensors` took. All ranks must call it.

    Raises:
        ValueError: if the parameters are not those of the checkpoint.
    """
    names = {parameter: name for name, parameter in objective.named_parameters()}
    stored: dict[str, dict[str, str]] = {}
    try:
        with safe_open(folder / OPTIMIZER_FILE, "pt") as file:
            for entry in file.keys():  # noqa: SIM118  (it is no dict)
                name, _, key = entry.rpartition("|")
                stored.setdefault(name, {})[key] = entry
            state = optimizer.state_dict()
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            unknown = sorted(set(stored) - {names[parameter] for parameter in parameters})
            if unknown:
                raise ValueError(
                    f"{folder} has the optimizer's state of {len(unknown)} parameters that are not trained now, such as "
                    f"{unknown[0]}. Resume with the flags that froze or shaped the model when it was written."
                )
            fresh = [names[parameter] for parameter in parameters if names[parameter] not in stored]
            if fresh:
                logger.info(
                    "%s has no optimizer's state of %d parameters that are trained now, such as %s; it begins at 0",
                    folder, len(fresh), fresh[0],
                )  # fmt: skip
            state["state"] = {
                place: {
                    key: _placed(key, file.get_tensor(entry), parameter)
                    for key, entry in stored[names[parameter]].items()
                }
                for place, parameter in enumerate(parameters)
                if names[parameter] in stored
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder / OPTIMIZER_FILE} cannot be read: {error}. Resume from another checkpoint."
        ) from error
    optimizer.load_state_dict(state)


def _placed(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """A number of steps stays one; all else has the shape of the parameter, and is sharded as it is."""
    return value if key == "step" else like(value, parameter)


def take(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    objective: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    average: WeightAverage | None,
    state: TrainerState,
    run: dict[str, Any],
    main: bool,
    buffers: dict[str, Buffers],
) -> Snapshot:
    """Copy everything that training changes. Called on all ranks; the copy is the main process's.

    `buffers` is empty at first, and holds the memory that the next call uses again: the snapshot before must be done with.
    """
    tensors = {}
    if optimizer is not None:
        held = buffers.setdefault(OPTIMIZER_FILE, {})
        tensors[OPTIMIZER_FILE] = copied(optimizer_tensors(optimizer, objective), main, held)
    if average is not None:
        tensors[average.file] = copied(average.values, main, buffers.setdefault(average.file, {}))
    weights = with_scalars(copied(model.state_dict(), main, buffers.setdefault("weights", {})))
    state = dataclasses.replace(state, log_history=list(state.log_history))  # which only grows
    return Snapshot(model, processor, state, run, weights, tensors)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two accounts of what decides the batches, in words; empty if nothing does."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in names)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint."""
    return json.loads(path.read_text(encoding="utf-8"))
