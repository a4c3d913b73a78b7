"""Capture everything that training changes, and restore it on any number of processes.

Every tensor is stored whole and under its parameter's name in safetensors files, and everything else as JSON: the number of
processes and the sharding of their weights leave no trace, and nothing is unpickled. Random states are not stored, because
every step seeds its own.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin, TrainerState
from transformers.utils import flatten_dict

from mm_utils.checkpointing.files import STATE_FILE
from mm_utils.distributed import RunError, on_first
from mm_utils.files import SUMS_FILE, read_json, readable, write_json
from mm_utils.model.adapt import load_weights, merged, save_adapters
from mm_utils.model.modeling_fusion_dual_encoder import DUAL_ENCODERS, FusionDualEncoderModel
from mm_utils.model.stock import stock_processor, to_dual_encoder
from mm_utils.objectives.objective import Objective
from mm_utils.sharding import full_tensor, shard_like
from mm_utils.text import without_secrets

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
RUN_FILE = "run.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_DEEPSPEED = "deepspeed"
_DUAL_ENCODER = "dual_encoder"
_NOT_COMPARED = ("architectures", "auto_map", "dtype", "rerank_weights", "torch_dtype", "transformers_version")
_SCALARS = ("logit_scale", "logit_bias")


@dataclass
class Snapshot:
    """A copy of a run in host memory, which training does not change."""

    model: PreTrainedModel  # whose configuration is written
    processor: ProcessorMixin
    state: TrainerState
    run: dict[str, Any]  # further JSON that a resumed run needs
    weights: dict[str, Tensor]  # adapters included
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # further ones, by file name
    folders: list[Path] = field(default_factory=list)  # on the same disk, to be linked into the checkpoint

    def write(self, folder: Path) -> None:
        """Write everything into a folder that `from_pretrained` reads."""
        self.model.save_pretrained(folder, state_dict=merged(self.weights))
        save_adapters(self.weights, folder)
        self.processor.save_pretrained(folder)
        for name, tensors in self.tensors.items():
            save_file(tensors, folder / name)
        for source in self.folders:
            shutil.copytree(source, folder / source.name, copy_function=os.link)
        self.state.save_to_json(str(folder / STATE_FILE))
        write_json(folder / RUN_FILE, self.run)


@dataclass
class TrainingState:
    """Everything that training changes: captured on all ranks, restored from a checkpoint.

    Args:
        processor: saved beside the model.
        objective: the unwrapped objective, which holds the model.
    """

    accelerator: Accelerator
    output_dir: Path
    processor: ProcessorMixin
    objective: Objective
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self.model = self.objective.model

    @property
    def nbytes(self) -> int:
        """Approximate bytes of a checkpoint, with two optimizer values a trained parameter."""
        parameters = list(self.model.parameters())
        weights = sum(parameter.nbytes for parameter in parameters)
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        return weights + 2 * trained

    def capture(self, state: TrainerState, run: dict[str, Any]) -> Snapshot:
        """Copy everything that training changes to the main process; called on all ranks."""
        main = self.accelerator.is_main_process
        scaler = self.accelerator.scaler
        run = {**run, "scaler": None if scaler is None else scaler.state_dict()}
        tensors = {}
        if not self._has_deepspeed:
            tensors[OPTIMIZER_FILE] = optimizer_tensors(self.optimizer, self.objective)
        copies = {name: copy_to_host(values, main) for name, values in tensors.items()}
        weights = copy_to_host(self.model.state_dict(), main)
        # training appends to it while a thread writes
        state = dataclasses.replace(state, log_history=list(state.log_history))
        snapshot = Snapshot(self.model, self.processor, state, run, restore_scalars(weights), copies)
        if self._has_deepspeed:
            snapshot.folders.append(self._save_deepspeed())
        return snapshot

    def restore(
        self, path: Path, identity: Mapping[str, Any], flags: Mapping[str, Any]
    ) -> tuple[TrainerState, dict[str, Any]]:
        """Load weights, optimizer and loss scale from a checkpoint, on all ranks.

        Args:
            identity, flags: the present run's `run["identity"]` and `run["flags"]`, which must be those of the checkpoint.

        Returns:
            The trainer's state, and the JSON that `capture` was given as `run`.

        Raises:
            ValueError: if the checkpoint is of another model or another run.
        """
        run = read_json(path / RUN_FILE)
        recorded = run.get("flags") or {}
        both = [name for name in flags if name in recorded]  # an earlier version had other flags
        before = {name: recorded[name] for name in both}
        before |= {**settings(type(self.model.config).from_pretrained(path)), **run["identity"]}
        now = {name: flags[name] for name in both}
        now |= {**settings(self.model.config), **identity}
        before.setdefault("validation split", now.get("validation split"))  # an earlier version recorded none
        changed = ", ".join(
            f"{name} was {_shown(before.get(name))} and is {_shown(now.get(name))}"
            for name in before | now
            if before.get(name) != now.get(name)
        )
        if changed:
            raise ValueError(
                f"--resume_from_checkpoint is {path}; since it was written, {changed}, so it would not be the same "
                "run. Give what it had (where that is None, leave the flag out), or start a new run with --model_name_or_path."
            )
        self.load_weights(path)
        if self._has_deepspeed:
            self.accelerator.load_state(str(path / _DEEPSPEED))
        else:
            load_optimizer(self.optimizer, self.objective, path)
        if self.accelerator.scaler is not None and run["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(run["scaler"])
        state = TrainerState.load_from_json(str(path / STATE_FILE))
        return state, run

    def load_weights(self, path: Path) -> None:
        """Load only weights, those of re-ranking too, from a checkpoint, on all ranks."""
        load_weights(self.model, path)
        config = read_json(path / "config.json")
        self.model.config.rerank_weights = config.get("rerank_weights")

    def save_model(self) -> None:
        """Write model and processor to the output folder, the stock model to `dual_encoder/`.

        Raises:
            RunError: on all ranks, if the weights are not finite.
        """
        main = self.accelerator.is_main_process
        weights = copy_to_host(self.model.state_dict(), main)

        def write() -> None:
            check_finite(weights, "the last step")
            write_model(self.output_dir, self.model, self.processor, merged(restore_scalars(weights)))

        on_first(write)

    @property
    def _has_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def _save_deepspeed(self) -> Path:
        """Let DeepSpeed write its own files: it cuts the optimizer's state into nameless pieces."""
        folder = self.output_dir / f".{_DEEPSPEED}" / _DEEPSPEED
        on_first(lambda: shutil.rmtree(folder.parent, ignore_errors=True))
        self.accelerator.save_state(str(folder))
        self.accelerator.wait_for_everyone()
        return folder


def write_model(
    folder: Path, model: FusionDualEncoderModel, processor: ProcessorMixin, weights: dict[str, Tensor] | None = None
) -> None:
    """Write model and processor, with `weights` if given, and the stock model to `dual_encoder/`, where there is one."""
    (folder / SUMS_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / _DUAL_ENCODER, ignore_errors=True)  # an earlier model's
    model.save_pretrained(folder, state_dict=weights)
    processor.save_pretrained(folder)
    if type(model) is FusionDualEncoderModel:  # a classifier's towers no longer match images and texts
        try:
            saved = FusionDualEncoderModel.from_pretrained(folder)
            stock = to_dual_encoder(saved)
            if stock.config.model_type != DUAL_ENCODERS[0]:
                processor = stock_processor(processor, stock.config, saved.config.text_padding)
            stock.save_pretrained(folder / _DUAL_ENCODER)
            processor.save_pretrained(folder / _DUAL_ENCODER)
        except ValueError as error:
            logger.info(
                "No class of transformers holds this model, so there is no dual_encoder/ folder, and AutoModel opens the run's own: %s.",
                error,
            )
        except RunError:  # it has diverged
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            raise
    readable(folder)


def check_finite(weights: Mapping[str, Tensor], after: str) -> None:
    """Raise RunError if weights, those `after` a step, have a NaN or an infinite value."""
    bad = [name for name, value in weights.items() if not value.isfinite().all()]
    if bad:
        raise RunError(
            f"the weights after {after} are not finite ({len(bad)} tensors, such as {bad[0]}), and are not saved. Start "
            "anew with a lower --learning_rate, or in bf16 or fp32."
        )


# -- tensors ----------------------------------------------------------------------------------------------------------


def copy_to_host(tensors: Mapping[str, Tensor], main: bool) -> dict[str, Tensor]:
    """Copy full tensors to the main process's memory, pinned for a GPU; on all ranks, others get an empty dict.

    Tensors that share memory, as tied weights do, share that of the copy.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    found = {}
    for name, value in tensors.items():
        complete = full_tensor(value.detach())  # a collective where the tensor is sharded
        if main:
            # tied weights are the same memory, read in the same way
            key = (getattr(value, "_local_tensor", value).data_ptr(), value.shape, value.stride(), value.dtype)
            if key not in copies:
                copies[key] = torch.empty_like(
                    complete, device="cpu", memory_format=torch.contiguous_format, pin_memory=complete.is_cuda
                ).copy_(complete)
            found[name] = copies[key]
    return found


def restore_scalars(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn temperature and bias, vectors of one in FSDP2 and DeepSpeed, into scalars again."""
    return {name: value.squeeze() if name in _SCALARS else value for name, value in weights.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, objective: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as `parameter|key` -> tensor, without rates and decay."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in objective.named_parameters()}
    return {
        # 'model.text_projection.weight|exp_avg'
        f"{names[parameter]}|{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, objective: nn.Module, folder: Path) -> None:
    """Load the state that `optimizer_tensors` returned; called on all ranks.

    Raises:
        ValueError: if the parameters are not those of the checkpoint.
    """
    stored: dict[str, dict[str, Tensor]] = {}
    for entry, value in load_file(folder / OPTIMIZER_FILE).items():
        name, _, key = entry.rpartition("|")
        stored.setdefault(name, {})[key] = value
    names = {parameter: name for name, parameter in objective.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [names[parameter] for parameter in parameters]
    if unknown := sorted(set(stored) - set(trained)):
        raise ValueError(
            f"{folder} has the optimizer's state of {len(unknown)} parameters that are not trained now, such as {unknown[0]}. "
            "Resume with the flags that froze or shaped the model when it was written."
        )
    state = optimizer.state_dict()
    state["state"] = {place: stored[name] for place, name in enumerate(trained) if name in stored}
    # A moment is sharded and lies in memory like its parameter, as fused optimizers ask for; step counts and Adafactor's sums of
    # rows and columns have shapes of their own.
    for place, values in state["state"].items():
        parameter = parameters[place]
        for key in _MOMENTS:
            if key in values:
                values[key] = torch.empty_like(parameter).copy_(shard_like(values[key], parameter))
    optimizer.load_state_dict(state)


# -- identity ---------------------------------------------------------------------------------------------------------


def settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return a configuration by name, `text_config.hidden_size` for a part."""
    flat = flatten_dict(json.loads(config.to_json_string(use_diff=False)))
    # leaves out 'text_config._name_or_path', 'vision_config.dtype' and the like
    private = re.compile(rf"(^|\.)(_|({'|'.join(_NOT_COMPARED)})(\.|$))")
    return {name: value for name, value in flat.items() if not private.search(name)}


def _shown(value: Any) -> str:
    """Return a value for a message: of batches of one size, the size."""
    return re.sub(r"BatchSizes\(starts=\(0,\), sizes=\((\d+),\)\)", r"\1", str(value))


def comparable(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags as a checkpoint has them: without secrets; of a model's place, its last part, as folders are moved."""
    places = {name: Path(value).name for name, value in flags.items() if value and name.endswith("_name_or_path")}
    return without_secrets({**flags, **places})
