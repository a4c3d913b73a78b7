"""Model FLOPs of a training step, counted exactly for any backbone by running the model, and their rate.

Model FLOPs as in PaLM's MFU (arXiv 2204.02311): every image, text and scored pair of the global batch goes forward and
backward once. Recomputation, by gradient caching, by checkpointing or because another rank needs the same text, is not counted.
Matrix products and convolutions count, attention without regard to masks; a multiplication with its addition is two FLOPs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerControl, TrainerState

from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderModel,
    image_backbone,
    input_shape,
    is_trained,
    text_positions,
)
from mm_utils.training.callbacks import RunCallback


class Quadratic(NamedTuple):
    """FLOPs by sequence length: poolers are constant, linear layers linear, attention quadratic."""

    constant: int
    linear: int
    quadratic: int

    def at(self, length: int) -> int:
        """Return the FLOPs for `length` tokens."""
        return self.constant + self.linear * length + self.quadratic * length**2


class FlopCounts(NamedTuple):
    """FLOPs of one row's forward pass, 0 for a missing head, and how many passes a step is worth."""

    image: int  # media tower and projection, per image, clip or sound
    keys_values: int  # image side of the fusion head, per image
    text: Quadratic  # text tower and projection, per text
    text_side: Quadratic  # text side of the fusion head, per text
    pair: Quadratic  # fusion head, per scored pair, by the length of its text
    # 3 of a trained tower, as a backward pass counts as two; 1 of a frozen one; 0 where its output is stored.
    vision_passes: int
    text_passes: int

    def training_step(self, images: int, text_lengths: Sequence[int], pairs: int = 0, pair_length: int = 0) -> int:
        """Return the FLOPs of a step with padded texts, in which the head scores pairs with texts of one length."""
        texts = sum(map(self.text.at, text_lengths))
        sides = images * (self.keys_values + self.text_side.at(pair_length))
        head = sides + pairs * self.pair.at(pair_length) if pairs else 0
        return images * self.image * self.vision_passes + texts * self.text_passes + 3 * head


@torch.no_grad()
def measure_flops(
    model: FusionDualEncoderModel,
    medium_size: int | Sequence[int],
    max_seq_length: int,
    frozen_towers_run: bool = True,
) -> FlopCounts:
    """Count the FLOPs of a model's parts in evaluation mode.

    Args:
        medium_size: side of an image, or the shape of one input of the media tower.

    Raises:
        ValueError: if the text tower cannot read captions of `max_seq_length` tokens.
    """
    most = text_positions(model.text_model)
    if most is not None and max_seq_length > most:
        raise ValueError(
            f"--max_seq_length is {max_seq_length}; the text backbone has positions for {most} tokens. Give at most {most}."
        )
    device = next(model.parameters()).device
    if isinstance(medium_size, int):
        medium_size = (input_shape(model.vision_model)[0], medium_size, medium_size)
    pixels = torch.zeros(2, *medium_size, dtype=model.dtype, device=device)
    shortest = max(1, min(8, max_seq_length // 3))
    ones = torch.ones(2, 3 * shortest, dtype=torch.long, device=device)

    def per_row(run: Callable[[int], Any]) -> int:
        """Return the FLOPs of one more row, without fixed costs (DeBERTa's relative positions)."""
        counted = []
        for rows in (1, 2):
            with FlopCounterMode(display=False) as counter:
                run(rows)
            counted.append(counter.get_total_flops())
        return counted[1] - counted[0]

    def by_length(flops: Callable[[torch.Tensor], int]) -> Quadratic:
        """Return the quadratic through three points whose lengths are 1, 2 and 3 times the first."""
        first, second, third = (flops(ones[:, : times * shortest]) for times in (1, 2, 3))
        quadratic = (third - 2 * second + first) // (2 * shortest**2)
        linear = (second - first) // shortest - 3 * shortest * quadratic
        return Quadratic(first - linear * shortest - quadratic * shortest**2, linear, quadratic)

    def text_flops(ids: torch.Tensor, with_states: bool = False) -> int:
        return per_row(lambda rows: model.encode_text(ids[:rows], ids[:rows], with_states))

    def pair_flops(mask: torch.Tensor) -> int:
        held = keys_values
        if held is None:
            return 0
        states = model.encode_text(mask, mask)[1]
        return per_row(lambda rows: model.match_pairs(tuple(kv[:, :rows] for kv in held), states[:rows], mask[:rows]))

    modes = [(module, module.training) for module in model.modules()]
    # Compiled code cannot be counted: up to torch 2.11 it would even stay uncompiled for good. Torch 2.6 counts fused attention
    # on CPUs as 0.
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        model.eval()
        try:
            image = per_row(lambda rows: model.encode_image(pixels[:rows], with_keys_values=False))
            keys_values_flops = per_row(lambda rows: model.encode_image(pixels[:rows])) - image
            keys_values = model.encode_image(pixels)[1]
            text, pair = by_length(text_flops), by_length(pair_flops)
            text_side = by_length(lambda ids: text_flops(ids, with_states=True) - text_flops(ids))
        finally:
            for module, mode in modes:
                module.training = mode
    towers = (image_backbone(model.vision_model), model.text_model)
    passes = [3 if is_trained(tower) else int(frozen_towers_run) for tower in towers]
    return FlopCounts(image, keys_values_flops, text, text_side, pair, *passes)


class FlopRates(RunCallback):
    """Add to each training row the model FLOPs per second, of this rank by default.

    tflops: of real tokens, in 10^12.
    """

    scripts = ("pretrain",)
    flops: Any = None

    def on_start(self, run: Any) -> None:
        """Count the FLOPs of the model."""
        self.pairs_per_image = run.objective.pairs_per_image
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
            self.pairs = self.operations = 0

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count from here, as rates do."""
        self.pairs = self.operations = 0
