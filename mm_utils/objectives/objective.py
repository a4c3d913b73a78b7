"""An objective, and the weighted sum of terms: encode, plan once, backpropagate by part.

The gradient of all embedding terms is taken at the embeddings of the whole batch (`plan`) and pushed through the towers
afterwards, a part of the batch at a time (`part`): see `mm_utils.objectives.grad_cache`. In one pass or in many, on one process
or on many, it is the same gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mm_utils import distributed
from mm_utils.model.encoding import encode_texts, stored_text, tokens_computed, vision_features
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, ResidualProjection, is_trained
from mm_utils.model.row_noise import RowDropout, row_keys, set_row_keys
from mm_utils.objectives.losses import call_roll, gather_batch
from mm_utils.objectives.terms import Batch, EmbeddingTerm, Encoded, Evaluator, Report, RowPlan, Term, TermOnRows
from mm_utils.objectives.workload import Workload
from mm_utils.text import own_name


@dataclass
class Plan:
    """The decisions for one step, made without gradient from the embeddings of the whole batch."""

    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the losses at this rank's `leaves`
    metrics: Report = field(default_factory=dict)  # global values to log
    rows: dict[str, RowPlan] = field(default_factory=dict)  # of each row term, by name


class Objective(nn.Module):
    """A loss of the global batch, computed in one part or in several.

    `objective(batch, step)` returns `{"loss": with gradient, name: detached value, ...}`, global values that are the same on
    all ranks. A subclass implements `encode`, `plan`, `part` and `report`. `seed` is that of dropout by row, and `added` are the
    names of the weights that the model got for this run.
    """

    highest_scale: float | None = None  # the bound of the inverse temperature; None for an objective without one
    # by about one length, or end to end; not where all ranks must run the tower equally often, as in FSDP
    groups_texts = True
    row_ids = "ids"  # the name of the ids of a batch's rows, from which dropout by row draws
    pairs_per_image = 0  # that the fusion head scores
    reranks = True  # whether an evaluation gives chosen pairs to the fusion head; else it reads rows as training does
    embeds_taps = False  # whether a term reads intermediate levels of the vision tower without the head

    def __init__(self, model: FusionDualEncoderModel, seed: int = 0, added: frozenset[str] = frozenset()):
        super().__init__()
        self.model = model
        self.seed = seed
        self.added = added
        self.workload = Workload()
        for place, projection in enumerate((model.visual_projection, model.text_projection), start=1):
            if isinstance(projection, ResidualProjection):
                RowDropout.replace(projection.dropouts, 10 * place)

    @property
    def reads_pairs(self) -> bool:
        """True if the fusion head scores pairs: it is trained, and a term does."""
        return self.pairs_per_image > 0 and self.model.fusion is not None and is_trained(self.model.fusion)

    @property
    def reads_taps(self) -> bool:
        """True if a term reads intermediate levels of the vision tower."""
        return self.reads_pairs or self.embeds_taps

    def forward(self, batch: Batch, step: int) -> Report:
        """Return the report of one global batch, of which `batch` is this rank's share."""
        batch = self.with_keys(batch, step)
        encoded = self.encode(batch)
        plan = self.plan(encoded, batch, step)
        loss, sums = self.part(encoded, batch, plan, plan.gradients, 1.0)
        report = self.report(plan, sums)
        return {**report, "loss": report["loss"] + (loss - loss.detach())}  # the global value, this rank's gradient

    def with_keys(self, batch: Batch, step: int) -> Batch:
        """Begin a step: add `row_keys` for dropout by row, a function of seed, step and row."""
        return batch | {"row_keys": row_keys(batch[self.row_ids], self.seed * 1_000_003 + step)}

    def encode(self, batch: Batch, for_backward: bool = True) -> Encoded:
        """Run the model on a part, as far as `plan` and, with `for_backward`, `part` need."""
        raise self._lacks("encode")

    def plan(self, encoded: Encoded, batch: Batch, step: int) -> Any:
        """Share the embeddings of all this rank's rows, take the loss's gradient at them, decide what `part` computes."""
        raise self._lacks("plan")

    def part(
        self, encoded: Encoded, batch: Batch, plan: Any, gradients: dict[str, Tensor | None], share: float
    ) -> tuple[Tensor, Tensor]:
        """Return a scalar whose gradient is the part's gradient, and the part's sums for `report`.

        Args:
            encoded, batch: the part.
            plan: the result of `plan`.
            gradients: the plan's gradients, for the part's rows.
            share: the part's share of the gradient of temperature and bias, which belong to no row.
        """
        raise self._lacks("part")

    def report(self, plan: Any, sums: Tensor) -> Report:
        """Return the values to log, from the sums of all this rank's parts."""
        raise self._lacks("report")

    def _lacks(self, method: str) -> ValueError:
        return ValueError(
            f"{type(self).__name__} has no method {method}; an Objective that writes only forward computes a step as a whole. Drop "
            "--micro_batch_size, or write encode, plan, part and report as mm_utils/finetuning/objective.py does."
        )


class JointObjective(Objective):
    """A weighted sum of terms; the model has the parts that they need (`Term.prepare`)."""

    def __init__(
        self,
        model: FusionDualEncoderModel,
        weights: dict[Term, float],
        seed: int = 0,
        added: frozenset[str] = frozenset(),
    ):
        super().__init__(model, seed, added)
        self.weights = weights
        self.highest_scale = max(100.0, model.logit_scale.exp().item())  # SigLIP's checkpoints are at about 118
        self.pairs_per_image = sum(term.pairs_per_image for term in weights)
        self.embeds_taps = any(term.reads_taps for term in weights)
        self.groups_texts = model.config.text_padding is None  # else all texts are computed at one length
        self._checked_totals = False

    def evaluators(self, medium: str) -> list[Evaluator]:
        """Return what measures the terms, one of a class."""
        evaluators = [evaluator for term in self.weights if (evaluator := term.evaluator(medium)) is not None]
        return list({type(evaluator): evaluator for evaluator in evaluators}.values())

    def with_keys(self, batch: Batch, step: int) -> Batch:
        """Begin a step; call the roll."""
        longest = max(batch[name].shape[1] for name in ("input_ids", "negative_input_ids") if name in batch)
        self.workload.begin(batch["ids"].device)
        places = list(range(len(batch["ids"])))
        return super().with_keys(batch, step) | {"roll_call": call_roll(batch["ids"], longest), "places": places}

    def encode(self, batch: Batch, for_backward: bool = True) -> Encoded:
        """Run both towers on a part of a batch, but for a frozen one whose features are there (`training.feature_cache`)."""
        is_blank = not len(batch["ids"])
        if is_blank:
            batch = blank_pair(batch)
        set_row_keys(self.model, batch.get("row_keys"))
        with_pairs = for_backward and self.reads_pairs
        pooled, taps = vision_features(self.model, batch, with_pairs or self.embeds_taps)
        # keys and values cost a projection of all image tokens, which an embedding alone does without
        image_nE, keys_values = self.model.project_image(pooled, taps if with_pairs else ())
        text = stored_text(self.model, batch, with_pairs)
        if text is None:
            lengths = batch.get("lengths") if self.groups_texts else None
            text = encode_texts(self.model, batch["input_ids"], batch["attention_mask"], lengths, with_pairs)
        # FSDP2 holds both scalars as vectors of one, and frees them after this.
        scale = self.model.logit_scale.exp().squeeze()
        bias = self.model.logit_bias
        bias = None if bias is None else bias.squeeze().clone()  # type: ignore[assignment]
        embeds = {"image": image_nE, "text": text[0]}
        encoded = Encoded(embeds, scale, bias, text[1], keys_values or (), taps, self.groups_texts)
        for term in self.weights:
            encoded.embeds |= term.embed(self.model, encoded, batch)
        if is_blank:
            encoded.embeds = {name: rows[:0] for name, rows in encoded.embeds.items()}
        return encoded

    def plan(self, encoded: Encoded, batch: Batch, step: int) -> Plan:
        """Take the gradient of all embedding terms at the embeddings; let the row terms plan."""
        lengths = [] if "text_pooled" in batch else batch.get("lengths", [])
        computed = len(lengths) * batch["input_ids"].shape[1]
        if self.groups_texts:
            computed = tokens_computed(self.model, lengths, batch["ids"].device.type)
        self.workload.end(batch["ids"].device, computed, sum(lengths))
        shared = gather_batch(encoded.embeds["image"], encoded.embeds["text"], batch["ids"], batch.get("roll_call"))
        # Before the loss: a host then reads what is drawn while the device still computes that.
        rows = {term.name: term.plan(batch, shared, encoded.scale.detach(), step) for term in self._row_terms()}
        if not self._checked_totals:
            self._checked_totals = True
            self._check_totals(rows, batch["ids"].device)
        leaves = {
            # fp32 also where the towers give bf16
            name: value.detach().to(torch.promote_types(value.dtype, torch.float32)).requires_grad_()
            for name, value in encoded.leaves.items()
        }
        scale = leaves["scale"]
        bias = leaves.get("bias")
        own = Encoded({name: leaves[name] for name in encoded.embeds}, scale, bias)
        total = scale.new_zeros(())
        metrics = Report()
        with torch.enable_grad():
            for term, weight in self.weights.items():
                if isinstance(term, EmbeddingTerm):
                    value = term.loss(own, shared)
                    metrics |= term.metrics(value.detach(), own)
                    total = total + weight * value
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if total.requires_grad:
            # None for what no term reads
            gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return Plan(dict(zip(leaves, gradients, strict=True)), {"loss": total.detach(), **metrics}, rows)

    def part(
        self, encoded: Encoded, batch: Batch, plan: Plan, gradients: dict[str, Tensor | None], share: float
    ) -> tuple[Tensor, Tensor]:
        """Return the part's surrogate loss, and each row term's loss and right rows, `[terms, 2]`."""
        is_blank = not len(batch["ids"])
        shown = blank_pair(batch) if is_blank else batch
        surrogate_loss = encoded.scale.new_zeros(())
        for scalar, gradient in ((encoded.scale, gradients["scale"]), (encoded.bias, gradients.get("bias"))):
            if scalar is not None:  # a loss may do without it, and DDP waits for a gradient
                surrogate_loss = surrogate_loss + share * (0 if gradient is None else gradient) * scalar
        for name, value in encoded.embeds.items():
            if (gradient := gradients[name]) is not None:
                surrogate_loss = surrogate_loss + (value * gradient).sum()
        sums = []
        for term in self._row_terms():
            rows = plan.rows[term.name]
            try:
                found = term.rows(self.model, encoded, shown, rows)
            except KeyError as error:
                if not term.readers or error.args[0] in shown:
                    raise
                raise distributed.RunError(
                    f"--objectives has {own_name(term)}, which reads {error.args[0]} of a batch; no row of these data has the column that "
                    "this comes from. Add the column, or drop the term."
                ) from error
            of_term = torch.stack([found.loss.detach().float(), found.right.float()])
            sums.append(torch.zeros_like(of_term) if is_blank else of_term)
            # The gradient of the sum over ranks, through an average over ranks. A blank pair has none, but runs the same modules.
            share_of_mean = 0 if is_blank else distributed.world_size() / rows.total
            surrogate_loss = surrogate_loss + self.weights[term] * found.loss * share_of_mean
        return surrogate_loss, torch.stack(sums) if sums else surrogate_loss.new_zeros(0, 2)

    def _check_totals(self, plans: dict[str, RowPlan], device: torch.device) -> None:
        """Refuse a term whose ranks divide by different numbers of rows: their losses would not be one mean."""
        for name, plan in plans.items():
            totals = [total for [total] in distributed.gather_on_hosts([int(plan.total)], device)]
            if len(set(totals)) > 1:
                raise ValueError(
                    f"plan of {name} returns a total of {' and '.join(map(str, totals))} on {len(totals)} processes; it is the number of rows "
                    "on all of them. Return distributed.sum_over_ranks(own).clamp(min=1)."
                )

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

    def _row_terms(self) -> list[TermOnRows]:
        terms = [term for term in self.weights if isinstance(term, TermOnRows)]
        return [term for term in terms if not term.pairs_per_image or self.reads_pairs]


def blank_pair(batch: Batch) -> Batch:
    """Return a stand-in for an empty batch, which backbones refuse and other ranks wait for: one pair of one token."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return {name: value.new_ones(1, *value.shape[1:]) for name, value in tensors.items()} | {
        "lengths": [1],
        "places": [0],
    }
