"""What happens during training besides training: the progress bar, the temperature's bound."""

import math
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState


class ProgressBar(TrainerCallback):
    """A bar over the steps with loss, pairs per second and the share of time spent waiting for data."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start where the run starts or goes on."""
        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="Training",
            unit="step",
            disable=not state.is_world_process_zero,
            dynamic_ncols=True,
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance by one step."""
        self.bar.update(1)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the newest figures behind the bar, and evaluations as lines above it."""
        logs = logs or {}
        if "loss" in logs:
            used = f", {logs['utilisation']:.0%} of peak" if "utilisation" in logs else ""
            self.bar.set_postfix_str(
                f"loss {logs['loss']:.3f}, {logs['pairs_per_second']:.0f} pairs/s, {logs['data_wait']:.0%} data wait{used}"
            )
        shown_names = ("recall@1", "eval_accuracy")
        recalls = {name: value for name, value in logs.items() if name.endswith(shown_names)}
        if recalls and state.is_world_process_zero:
            shown = ", ".join(f"{name.removeprefix('eval_').replace('_', ' ')} {v:.3f}" for name, v in recalls.items())
            self.bar.write(f"step {state.global_step}: {shown}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the finished bar on the screen."""
        self.bar.close()


class TemperatureClamp(TrainerCallback):
    """Keep the inverse temperature between 1 and `maximum` after every step (CLIP, arXiv 2103.00020, uses 100)."""

    def __init__(self, maximum: float):
        self.maximum = math.log(maximum)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Clamp the parameter in place."""
        kwargs["model"].logit_scale.clamp_(0.0, self.maximum)
