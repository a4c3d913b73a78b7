"""An objective, and the weighted sum of terms: encode, plan once, backpropagate by part.

The gradient of all embedding terms is taken at the embeddings of the whole batch (`plan`) and pushed through the towers
afterwards, a part of the batch at a time (`part`), together with the rows that are computed there: see
`mm_utils.objectives.grad_cache`. In one pass or in many, on one process or on many, it is the same gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from mm_utils import distributed
from mm_utils.model.adapt import WeightAverage
from mm_utils.model.encoding import encode_in_groups, stored_text, vision_features
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, ResidualProjection
from mm_utils.model.row_noise import RowDropout, row_keys, set_row_keys
from mm_utils.objectives.losses import GlobalBatch, gather_batch
from mm_utils.objectives.ranks import RollCall
from mm_utils.objectives.terms import (
    Batch,
    EmbeddingTerm,
    EncodedBatch,
    Evaluator,
    LossInputs,
    Plan,
    Report,
    RowTerm,
    Term,
)


class Objective(nn.Module):
    """A loss of the global batch, computed in one part or in several.

    `objective(batch, step)` returns `{"loss": with gradient, name: detached value, ...}`, global values that are the same on
    all ranks. A subclass implements `encode`, `plan`, `part` and `report`.

    Attributes:
        is_wrapped: True where DDP or DeepSpeed waits for a gradient of every trained parameter; the step sets it.
        groups_texts: True if texts go through their tower in groups of about one length; False where all ranks must run it
            equally often, as with FSDP.
        average: the weight average; the trainer sets it.
        seed: the seed of dropout by row (`mm_utils.model.row_noise`); the trainer sets it.
        row_ids: the name of the ids of a batch's rows, from which that dropout draws.
        pairs_per_image: how many pairs the fusion head scores for each image.
        begin: called with (objective, step) at the beginning of a step, it sets the next two (`mm_utils.training.phases`).
        scores_pairs: whether this step has the terms that score pairs.
        idle: parameters that this step does not train.
    """

    groups_texts = True
    is_wrapped = True
    seed = 0
    row_ids = "ids"
    average: WeightAverage | None = None
    pairs_per_image = 0
    begin: Callable[["Objective", int], None] | None = None
    scores_pairs = True
    idle: Sequence[nn.Parameter] = ()
    added: frozenset[str] = frozenset()

    def __init__(self, model: FusionDualEncoderModel):
        super().__init__()
        self.model = model
        for place, projection in enumerate((model.visual_projection, model.text_projection), start=1):
            if isinstance(projection, ResidualProjection):
                RowDropout.replace(projection.dropouts, 10 * place)

    @property
    def reads_pairs(self) -> bool:
        """True if the fusion head scores pairs."""
        return self.pairs_per_image > 0

    @property
    def reads_taps(self) -> bool:
        """True if a term reads intermediate levels of the vision tower."""
        return self.reads_pairs

    def forward(self, batch: Batch, step: int) -> Report:
        """Return the report of one global batch, of which `batch` is this rank's share."""
        batch = self.with_keys(batch, step)
        encoded = self.encode(batch)
        plan = self.plan(encoded, batch, step)
        loss, sums = self.part(encoded, batch, plan, plan.gradients, 0, 1.0)
        report = self.report(plan, sums)
        return {**report, "loss": report["loss"] + (loss - loss.detach())}  # the global value, this rank's gradient

    def with_keys(self, batch: Batch, step: int) -> Batch:
        """Begin a step: add `row_keys` for dropout by row, a function of seed, step and row."""
        if self.begin is not None:
            self.begin(self, step)
        return batch | {"row_keys": row_keys(batch[self.row_ids], self.seed * 1_000_003 + step)}

    def clip_gradients(self, accelerator: Accelerator, max_norm: float) -> Tensor:
        """Clip the norm of the averaged gradient; return what it was, the same on all ranks."""
        if accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU):
            accelerator.unscale_gradients()  # what follows it in accelerate takes 1 % of a small step
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        return accelerator.clip_grad_norm_(self.parameters(), max_norm)

    def idle_weights(self) -> list[nn.Parameter]:
        """Return the parameters that other steps train, and this one does not."""
        return [weight for weight in self.idle if weight.requires_grad]

    def zero_of_idle(self) -> Tensor | float:
        """Return 0, with a gradient for idle weights, where one is waited for."""
        if not self.is_wrapped:
            return 0.0
        return 0 * sum((weight.sum() for weight in self.idle_weights()), torch.zeros(()))

    def encode(self, batch: Batch, for_backward: bool = True) -> Any:
        """Run the model on a part, as far as `plan` and, with `for_backward`, `part` need."""
        raise ValueError(
            f"{type(self).__name__} cannot be cut into micro-batches: it has a `forward` alone. Drop --micro_batch_size, "
            "or give it `encode`, `plan`, `part` and `report`."
        )

    def plan(self, encoded: Any, batch: Batch, step: int) -> Plan:
        """Share the embeddings, take the loss's gradient at them, decide what `part` computes.

        `encoded` is as from `encode`, with the embeddings of all of this rank's rows; the step keys random draws.
        """
        raise NotImplementedError

    def part(
        self,
        encoded: Any,
        batch: Batch,
        plan: Any,
        gradients: dict[str, Tensor | None],
        start_row: int,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        """Return a scalar whose gradient is the part's gradient, and the part's sums for `report`.

        Args:
            encoded, batch: the part.
            gradients: the plan's gradients, for the part's rows.
            start_row: the place of the part's first row among this rank's rows.
            share: the part's share of the gradient of temperature and bias, which belong to no row.
        """
        raise NotImplementedError

    def report(self, plan: Any, sums: Tensor) -> Report:
        """Return the values to log, from the sums of all this rank's parts."""
        raise NotImplementedError


class JointObjective(Objective):
    """A weighted sum of terms; the model has the parts that they need (`Term.prepare`)."""

    def __init__(self, model: FusionDualEncoderModel, weights: dict[Term, float]):
        super().__init__(model)
        self.weights = weights
        self.most_rows = 0  # that a rank had in a step so far
        self.pairs_per_image = sum(term.pairs_per_image for term in weights)
        self.embeds_taps = any(term.reads_taps for term in weights)
        self.groups_texts = model.config.text_padding is None  # else all texts are computed at one length

    def evaluators(self, medium: str) -> list[Evaluator]:
        """Return what measures the terms, one of a class."""
        found = (term.evaluator(medium) for term in self.weights)
        return list({type(each): each for each in found if each is not None}.values())

    @property
    def reads_pairs(self) -> bool:
        """True if the fusion head scores pairs in this step."""
        return super().reads_pairs and self.scores_pairs

    @property
    def reads_taps(self) -> bool:
        """True if a term reads intermediate levels of the vision tower."""
        return self.reads_pairs or self.embeds_taps

    def with_keys(self, batch: Batch, step: int) -> Batch:
        """Begin a step; ask for what hosts must know, so that they need not wait for the towers."""
        texts = [value for name, value in batch.items() if name.endswith("input_ids")]
        roll = RollCall(batch["ids"], max(ids.shape[1] for ids in texts if ids.dim() == 2), self.most_rows)
        batch = super().with_keys(batch, step)
        asked = {name: copy for term in self._row_terms() for name, copy in term.ask(batch).items()}
        return batch | {"roll_call": roll} | asked

    def encode(self, batch: Batch, for_backward: bool = True) -> EncodedBatch:
        """Run both towers on a part of a batch.

        A frozen tower whose features are in the batch (`mm_utils.training.feature_cache`) does not run.
        """
        own = len(batch["ids"])
        if not own:
            batch = blank_pair(batch)
        set_row_keys(self.model, batch.get("row_keys"))
        with_pairs = for_backward and self.reads_pairs
        pooled, taps = vision_features(self.model, batch, with_pairs or self.embeds_taps)
        image_nE, keys_values = self.model.project_image(pooled, taps if with_pairs else ())
        text_nE, text_states = self._encode_text(batch, with_pairs)
        # FSDP2 holds both scalars as vectors of one, and frees them after this.
        scale, bias = self.model.logit_scale.exp().squeeze(), self.model.logit_bias
        bias = None if bias is None else bias.squeeze().clone()  # type: ignore[assignment]
        embeds = {"image": image_nE, "text": text_nE}
        encoded = EncodedBatch(embeds, scale, bias, text_states, keys_values or (), taps)
        for term in self.weights:
            embeds |= term.embed(self.model, encoded, batch)
        if not own:
            encoded.embeds = {name: value[:0] for name, value in embeds.items()}
        return encoded

    def plan(self, encoded: EncodedBatch, batch: Batch, step: int) -> Plan:
        """Take the gradient of all embedding terms at the embeddings; let the row terms plan."""
        own = LossInputs(
            {name: leaf(value) for name, value in encoded.embeds.items()},
            leaf(encoded.scale),
            None if encoded.bias is None else leaf(encoded.bias),
        )
        shared = gather_batch(own.embeds["image"], own.embeds["text"], batch["ids"], batch.get("roll_call"))
        self.most_rows = max(self.most_rows, *shared.sizes)
        scale = encoded.scale.detach()
        # Before the loss: a host then reads what is drawn while the device still computes that.
        rows = {term.name: term.plan(self.model, batch, shared, scale, step) for term in self._row_terms()}
        plan = self.plan_embeddings(own, shared)
        plan.rows = rows
        return plan

    def plan_embeddings(self, own: LossInputs, shared: GlobalBatch) -> Plan:
        """Take the gradient of all embedding terms at this rank's rows of a shared batch."""
        metrics: Report = {}
        total = own.scale.new_zeros(())
        with torch.enable_grad():
            for term, weight in self.weights.items():
                if isinstance(term, EmbeddingTerm):
                    value = term.loss(own, shared)
                    metrics |= term.metrics(value.detach(), own)
                    total = total + weight * value
        scalars = [own.scale] if own.bias is None else [own.scale, own.bias]
        leaves = [*own.embeds.values(), *scalars]
        gradients = (
            torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
        )
        by_name = dict(zip(own.embeds, gradients, strict=False))
        return Plan(by_name, list(gradients[len(by_name) :]), shared, {"loss": total.detach(), **metrics})

    def part(
        self,
        encoded: EncodedBatch,
        batch: Batch,
        plan: Plan,
        gradients: dict[str, Tensor | None],
        start_row: int,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the part's surrogate loss, and each row term's loss and right rows, `[terms, 2]`."""
        assert plan.shared is not None
        batch = batch if self.groups_texts else batch | {"lengths": []}
        surrogate_loss = encoded.scale.new_zeros(())
        for scalar, gradient in zip((encoded.scale, encoded.bias), plan.scalar_gradients, strict=False):
            if scalar is not None:  # a loss may do without it, and DDP waits for a gradient
                surrogate_loss = surrogate_loss + share * (0 if gradient is None else gradient) * scalar
        for name, gradient in gradients.items():
            if gradient is not None:
                surrogate_loss = surrogate_loss + (encoded.embeds[name] * gradient).sum()
        surrogate_loss = surrogate_loss + self.zero_of_idle()
        sums = []
        for term in self._row_terms():
            rows = plan.rows[term.name]
            loss, correct = term.part(self.model, encoded, batch, rows, plan.shared, start_row)
            # The gradient of the sum over ranks, through an average over ranks.
            surrogate_loss = surrogate_loss + self.weights[term] * loss * (distributed.world_size() / rows.total)
            sums.append(torch.stack([loss.detach().float(), correct.float()]))
        return surrogate_loss, torch.stack(sums) if sums else surrogate_loss.new_zeros(0, 2)

    def report(self, plan: Plan, sums: Tensor) -> Report:
        """Return the total loss, and the metrics of each term."""
        metrics = dict(plan.metrics)
        if len(sums):
            sums = distributed.sum_over_ranks(sums)
        for term, (loss, correct) in zip(self._row_terms(), sums, strict=True):
            total = plan.rows[term.name].total
            metrics |= term.metrics(loss / total, correct / total)
            metrics["loss"] = metrics["loss"] + self.weights[term] * loss / total
        return metrics

    def _row_terms(self) -> list[RowTerm]:
        terms = [term for term in self.weights if isinstance(term, RowTerm)]
        return [term for term in terms if self.scores_pairs or not term.pairs_per_image]

    def _encode_text(self, batch: Batch, with_states: bool) -> tuple[Tensor, Tensor]:
        if (found := stored_text(self.model, batch, with_states)) is not None:
            return found
        lengths = batch.get("lengths") if self.groups_texts else None
        return encode_in_groups(self.model, batch["input_ids"], batch["attention_mask"], lengths, with_states)


def blank_pair(batch: Batch) -> Batch:
    """Return a stand-in for an empty batch, which backbones refuse and other ranks wait for."""
    return {name: value.new_ones(1, *value.shape[1:]) for name, value in batch.items() if isinstance(value, Tensor)}


def leaf(value: Tensor) -> Tensor:
    """Return a value in at least fp32, at which a gradient is taken."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32)).requires_grad_()
