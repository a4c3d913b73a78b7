"""A weighted sum of terms as one objective: encode a batch, decide once, push the gradient.

The gradient of all embedding terms is taken at the embeddings of the whole batch (`plan`) and pushed through the towers
afterwards, a part of the batch at a time (`part`), together with the rows that are computed there: see
`mm_utils.grad_cache`. In one pass or in many, on one process or on many, it is the same gradient.
"""

from functools import partial

import torch
from torch import Tensor, nn

from mm_utils import ranks
from mm_utils.averaging import WeightAverage
from mm_utils.losses import gather_batch
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.terms import Batch, EmbeddingTerm, Encoded, Leaves, Plan, Report, RowTerm, Term
from mm_utils.padding import encode_in_groups


class Objective(nn.Module):
    """What the trainer optimises: `objective(batch, step)` gives `{"loss": with gradient, name: detached value, ...}`.

    Every value is that of the global batch, the same on all ranks. A subclass says what `forward` is.

    Attributes:
        groups_texts: whether texts go through their tower in groups of about one length. Not where ranks must run it
            equally often, as FSDP's must.
        teacher: the average of the weights, for terms that learn from it; the trainer sets it.
        pairs_per_image: how many pairs the fusion head takes for each image.
    """

    groups_texts = True
    teacher: WeightAverage | None = None
    pairs_per_image = 0

    def __init__(self, model: FusionDualEncoderModel):
        super().__init__()
        self.model = model

    @property
    def reads_pairs(self) -> bool:
        """Whether the fusion head takes any."""
        return self.pairs_per_image > 0

    @property
    def reads_taps(self) -> bool:
        """Whether anything reads what the vision tower has in between."""
        return self.reads_pairs


class JointObjective(Objective):
    """A weighted sum of terms.

    Args:
        model: with what the terms need (`Term.prepare`).
        weights: of the terms.
    """

    def __init__(self, model: FusionDualEncoderModel, weights: dict[Term, float]):
        super().__init__(model)
        self.weights = weights
        self.pairs_per_image = sum(term.pairs_per_image for term in weights)
        self.embeds_taps = any(term.reads_taps for term in weights)
        self.needs_teacher = any(term.needs_teacher for term in weights)

    @property
    def reads_taps(self) -> bool:
        """As `Objective.reads_taps`."""
        return self.reads_pairs or self.embeds_taps

    def forward(self, batch: Batch, step: int) -> Report:
        """The report of one global batch, of which `batch` is this rank's share."""
        encoded = self.encode(batch)
        plan = self.plan(encoded, batch, step)
        loss, sums = self.part(encoded, batch, plan, plan.gradients, 0, 1.0)
        report = self.report(plan, sums)
        return {**report, "loss": report["loss"] + (loss - loss.detach())}  # the global value, this part's gradient

    def encode(self, batch: Batch, deciding: bool = True, pushing: bool = True) -> Encoded:
        """Both towers on a batch, with what `plan` needs, what `part` needs, or both.

        Where the batch holds the features of a frozen tower (`mm_utils.feature_cache`), that tower does not run.
        """
        own = len(batch["ids"])
        if not own:
            batch = blank_pair(batch)
        with_pairs = pushing and self.reads_pairs
        taught = self._taught(batch) if self.needs_teacher and deciding else {}
        pooled, taps = self._vision_features(batch, with_pairs or self.embeds_taps)
        image_nE, keys_values = self.model.project_image(pooled, taps if with_pairs else ())
        text_nE, text_states = self._encode_text(batch, with_pairs)
        # FSDP2 makes vectors of one of both scalars, and frees them after this.
        scale, bias = self.model.logit_scale.exp().squeeze(), self.model.logit_bias
        bias = None if bias is None else bias.squeeze().clone()  # type: ignore[assignment]
        embeds = {"image": image_nE, "text": text_nE, **taught}
        encoded = Encoded(embeds, scale, bias, text_states, keys_values or (), taps)
        for term in self.weights:
            embeds |= term.embed(self.model, encoded, batch)
        if not own:
            encoded.embeds = {name: value[:0] for name, value in embeds.items()}
        return encoded

    def plan(self, encoded: Encoded, batch: Batch, step: int) -> Plan:
        """Share the embeddings with all ranks and take the gradient of their losses at them; decide what to compute.

        Args:
            encoded: with the embeddings of all of this rank's rows.
            batch: this rank's.
            step: keys what is drawn.
        """
        own = Leaves(
            {name: _leaf(value) for name, value in encoded.embeds.items()},
            _leaf(encoded.scale),
            None if encoded.bias is None else _leaf(encoded.bias),
        )
        shared = gather_batch(own.embeds["image"], own.embeds["text"], batch["ids"])
        figures: Report = {}
        total = own.scale.new_zeros(())
        with torch.enable_grad():
            for term, weight in self.weights.items():
                if isinstance(term, EmbeddingTerm):
                    value = term.loss(own, shared)
                    figures |= term.figures(value.detach(), own)
                    total = total + weight * value
        scalars = [own.scale] if own.bias is None else [own.scale, own.bias]
        leaves = [*own.embeds.values(), *scalars]
        gradients = (
            torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
        )
        by_name = dict(zip(own.embeds, gradients, strict=False))
        plan = Plan(by_name, list(gradients[len(by_name) :]), shared)
        plan.figures = {"loss": total.detach(), **figures}
        scale = encoded.scale.detach()
        plan.rows = {term.name: term.plan(self.model, batch, shared, scale, step) for term in self._row_terms()}
        return plan

    def part(
        self,
        encoded: Encoded,
        batch: Batch,
        plan: Plan,
        gradients: dict[str, Tensor | None],
        low: int,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        """A scalar whose gradient is that of a part of the batch, and the part's sums for `report`.

        Args:
            encoded, batch: the part, which begins at row `low` of this rank's share.
            gradients: of `plan`, the part's rows.
            share: the part's share of the gradient of temperature and bias, which belong to no row.
        """
        batch = batch if self.groups_texts else batch | {"lengths": []}
        pulled = encoded.scale.new_zeros(())
        for scalar, gradient in zip((encoded.scale, encoded.bias), plan.scalar_gradients, strict=False):
            if gradient is not None and scalar is not None:
                pulled = pulled + share * gradient * scalar
        for name, gradient in gradients.items():
            if gradient is not None:
                pulled = pulled + (encoded.embeds[name] * gradient).sum()
        sums = []
        for term in self._row_terms():
            rows = plan.rows[term.name]
            loss, right = term.part(self.model, encoded, batch, rows, plan.shared, low)
            # The gradient of the sum over ranks, through an average over ranks.
            pulled = pulled + self.weights[term] * loss * (ranks.world_size() / rows.total)
            sums.append(torch.stack([loss.detach().float(), right.float()]))
        return pulled, torch.stack(sums) if sums else pulled.new_zeros(0, 2)

    def report(self, plan: Plan, sums: Tensor) -> Report:
        """What the trainer logs, from the sums of all this rank's parts."""
        figures = dict(plan.figures)
        if len(sums):
            sums = ranks.sum_over_ranks(sums)
        for term, (loss, right) in zip(self._row_terms(), sums, strict=True):
            total = plan.rows[term.name].total
            figures |= term.figures(loss / total, right / total)
            figures["loss"] = figures["loss"] + self.weights[term] * loss / total
        return figures

    def _row_terms(self) -> list[RowTerm]:
        return [term for term in self.weights if isinstance(term, RowTerm)]

    @torch.no_grad()
    def _taught(self, batch: Batch) -> dict[str, Tensor]:
        """Embeddings by the average of the weights, as `teacher_image` and `teacher_text`."""
        if self.teacher is None:
            raise ValueError(
                "--ema_decay is 0; self_distillation learns from the average of the weights. Set it to 0.995."
            )
        training = self.model.training
        with self.teacher.applied():
            self.model.eval()
            image_nE, _ = self.model.project_image(self._vision_features(batch, False)[0], ())
            text_nE, _ = self._encode_text(batch, False)
            self.model.train(training)
        torch.clear_autocast_cache()  # it holds the average's weights in half precision
        return {"teacher_image": image_nE, "teacher_text": text_nE}

    def _vision_features(self, batch: Batch, with_taps: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        model = self.model
        if "vision_pooled" not in batch:
            return model.vision_features(batch["pixel_values"], with_taps)
        taps = range(len(model.fusion.taps)) if with_taps and model.fusion is not None else ()
        pooled, *read = (
            batch[name].to(model.dtype) for name in ("vision_pooled", *map("vision_taps_{}".format, taps))
        )
        return pooled, tuple(read)

    def _encode_text(self, batch: Batch, with_states: bool) -> tuple[Tensor, Tensor]:
        input_ids, attention_mask = batch["input_ids"], batch["attention_mask"]
        if "text_pooled" in batch:
            pooled = batch["text_pooled"].to(self.model.dtype)
            # A part of a batch is padded to its own longest caption.
            states = batch["text_states"][:, : attention_mask.shape[1]].to(pooled) if with_states else None
            return self.model.project_text(pooled, states)
        encode = partial(self.model.encode_text, with_states=with_states)
        return encode_in_groups(encode, input_ids, attention_mask, batch.get("lengths") if self.groups_texts else None)


def blank_pair(batch: Batch) -> Batch:
    """Stands in for an empty batch: backbones refuse those, and the other ranks wait for this one's gradients."""
    return {name: value.new_ones(1, *value.shape[1:]) for name, value in batch.items() if isinstance(value, Tensor)}


def _leaf(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32)).requires_grad_()
