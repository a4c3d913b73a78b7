"""The rate of a run's model FLOPs, as a callback."""

from typing import Any

from transformers import TrainerControl, TrainerState

from mm_utils.arguments import Parsed
from mm_utils.training.callbacks import RunCallback


class FlopRates(RunCallback):
    """Add to each training row the model FLOPs per second, of this rank by default.

    tflops: of real tokens, in 10^12 (`mm_utils.extras.flops.counts`). utilisation: their share of the device's peak.
    """

    scripts = ("pretrain",)
    flops: Any = None

    @classmethod
    def attach(cls, given: Parsed) -> "FlopRates | None":
        """Return the callback of a run whose processes have all of the model."""
        return cls() if given["placement"] in (None, "together") else None

    def on_start(self, run: Any) -> None:
        """Count the FLOPs of a model of one medium."""
        from mm_utils.extras.flops.counts import measure_flops

        self.pairs_per_image = run.objective.pairs_per_image
        if len(run.data.media) == 1:
            shape = run.data.loaders.blank(1).shape[1:]
            self.flops = measure_flops(run.model, shape, run.data.max_seq_length, not run.given["cache_features"])
        self.pairs = self.operations = 0

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count a step."""
        lengths = kwargs["batch"]["lengths"]
        if self.flops is not None and lengths:
            scored, mean = self.pairs_per_image * len(lengths), round(sum(lengths) / len(lengths))
            self.operations += self.flops.training_step(len(lengths), lengths, scored, mean)
        self.pairs += args.batch_sizes.at(state.global_step - 1)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the rates to a training row that has that of pairs."""
        logs = kwargs["logs"]
        if self.flops is not None and "pairs_per_second" in logs:
            logs["tflops"] = self.operations * logs["pairs_per_second"] / max(1, self.pairs) / 1e12
            if args.peak_tflops:
                logs["utilisation"] = logs["tflops"] / args.peak_tflops
            self.pairs = self.operations = 0

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count from here, as rates do."""
        self.pairs = self.operations = 0
