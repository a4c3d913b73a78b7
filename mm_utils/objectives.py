"""What is optimised: an objective encodes a batch and returns its loss, and the trainer knows nothing else about it.

    forward(batch, step) -> {"loss": scalar with gradient, name: detached scalar to log, ...}

Every value is that of the global batch, the same on all ranks. A new objective is a subclass of `Objective`.

Shape letters: n this rank's pairs, N the global batch, P pairs scored by the fusion head here, L tokens, E embedding.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mm_utils import ranks
from mm_utils.arguments import arg
from mm_utils.losses import GlobalBatch, gather_batch, hard_negatives, info_nce, sigmoid_loss
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues
from mm_utils.padding import length_groups

Batch = dict[str, Any]
Report = dict[str, Tensor]
MATCH_PRIOR_ENTROPY = 0.6365  # of one positive to two negatives: a matching loss that stays here has learnt nothing


@dataclass
class ObjectiveArguments:
    """What is optimised, and how much each term counts."""

    objectives: str = arg(
        "contrastive:1,matching:1", "Terms and weights: contrastive (InfoNCE) or sigmoid (SigLIP), and matching."
    )
    max_logit_scale: float = arg(100.0, "The inverse temperature is kept at or below this.")

    def __post_init__(self) -> None:
        self.weights  # noqa: B018  (complain now, not after the data is loaded)

    @property
    def weights(self) -> dict[str, float]:
        """The terms by name."""
        weights = {}
        for term in self.objectives.split(","):
            name, _, weight = term.strip().partition(":")
            try:
                weights[name] = float(weight or 1)
            except ValueError:
                raise ValueError(f"--objectives has {term!r}; write name:weight, e.g. matching:0.5.") from None
        towers = [name for name in ("contrastive", "sigmoid") if weights.get(name)]
        unknown = set(weights) - {"contrastive", "sigmoid", "matching"}
        if unknown or len(towers) != 1 or not all(0 <= weight < math.inf for weight in weights.values()):
            raise ValueError(
                f"--objectives is {self.objectives!r}; give contrastive:W or sigmoid:W with W above 0 and, if you like, "
                "matching:W."
            )
        return {name: weight for name, weight in weights.items() if weight}


@dataclass
class Encoded:
    """A batch of n pairs after both towers.

    Attributes:
        image_nE, text_nE: unit embeddings.
        scale: scalar inverse temperature.
        bias: scalar added to the logits, of a model that has one.
        text_states: `[n, L, C]` last hidden states of the text tower.
        keys_values: the image side of the fusion head; empty where it was not asked for.

    A rank without a readable pair has n = 0 embeddings, and the states of one blank pair.
    """

    image_nE: Tensor
    text_nE: Tensor
    scale: Tensor
    bias: Tensor | None
    text_states: Tensor
    keys_values: KeysValues


class Objective(nn.Module):
    """Base class: holds the model and encodes a batch with it.

    Attributes:
        matches: whether the fusion head is trained.
        groups_texts: whether texts go through their tower in groups of about one length. Not where ranks must run it
            equally often, as FSDP's must.
    """

    matches = False
    groups_texts = True

    def __init__(self, model: FusionDualEncoderModel):
        super().__init__()
        self.model = model

    def encode(self, batch: Batch, match: bool) -> Encoded:
        """Both towers on a batch, and the image side of the head if `match`; pairs are not scored.

        Where the batch holds the features of a frozen tower (`mm_utils.feature_cache`), that tower does not run.
        """
        own = len(batch["ids"])
        if not own:
            batch = _blank_pair(batch)
        image_nE, keys_values = self._encode_image(batch, match)
        text_nE, text_states = self._encode_text(batch)
        # FSDP2 makes vectors of one of both scalars, and frees them after this.
        scale, bias = self.model.logit_scale.exp().squeeze(), self.model.logit_bias
        bias = None if bias is None else bias.squeeze().clone()  # type: ignore[assignment]
        return Encoded(image_nE[:own], text_nE[:own], scale, bias, text_states, keys_values or ())

    def _encode_image(self, batch: Batch, match: bool) -> tuple[Tensor, KeysValues | None]:
        model = self.model
        if "vision_pooled" not in batch:
            return model.encode_image(batch["pixel_values"], with_keys_values=match)
        taps = range(len(model.fusion.taps)) if match and model.fusion is not None else ()
        pooled, *read = (
            batch[name].to(model.dtype) for name in ("vision_pooled", *map("vision_taps_{}".format, taps))
        )
        return model.project_image(pooled, read)

    def _encode_text(self, batch: Batch) -> tuple[Tensor, Tensor]:
        input_ids, attention_mask = batch["input_ids"], batch["attention_mask"]
        if "text_pooled" in batch:
            pooled = batch["text_pooled"].to(self.model.dtype)
            # Without matching there are no states. A part of a batch is padded to its own longest caption.
            states = batch.get("text_states", pooled[:, None])[:, : attention_mask.shape[1]]
            return self.model.project_text(pooled), states.to(pooled)
        lengths = batch.get("lengths") if self.groups_texts else None
        if not lengths:
            return self.model.encode_text(input_ids, attention_mask)
        embeds, states = [], []
        for group in length_groups(lengths, input_ids.device.type):
            rows, longest = slice(group.start, group.stop), max(lengths[group.start : group.stop])
            found = self.model.encode_text(input_ids[rows, :longest], attention_mask[rows, :longest])
            embeds.append(found[0])
            states.append(F.pad(found[1], (0, 0, 0, input_ids.shape[1] - longest)))
        return torch.cat(embeds), torch.cat(states)


@dataclass
class Plan:
    """What is decided once a step, from the embeddings of the whole batch and without gradient.

    Attributes:
        image_grad_nE, text_grad_nE: gradient of the weighted contrastive loss by this rank's embeddings.
        scale_grad, bias_grad: and by the inverse temperature and the bias.
        figures: global values to log.
        shared: what all ranks know of the batch.
        pairs: local image, global text and whether they match, of the pairs to score here; and how many all ranks score.
        input_ids, attention_mask: of all texts of the global batch.
    """

    image_grad_nE: Tensor
    text_grad_nE: Tensor
    scale_grad: Tensor
    bias_grad: Tensor | None
    figures: dict[str, Tensor]
    shared: GlobalBatch
    pairs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None


class ContrastiveObjective(Objective):
    """InfoNCE or the sigmoid loss over the global batch (`mm_utils.losses`).

    The loss of a batch is a function of its embeddings, so its gradient may be taken at the embeddings first (`plan`) and
    pushed through the towers afterwards, a part of the batch at a time (`part`): see `mm_utils.grad_cache`. In one pass or
    in many, it is the same gradient.

    Args:
        model: with a `logit_bias` for the sigmoid loss, without one for InfoNCE.
        weight: of the loss.
    """

    def __init__(self, model: FusionDualEncoderModel, weight: float = 1.0):
        super().__init__(model)
        self.weight = weight

    def forward(self, batch: Batch, step: int) -> Report:
        """The report of one global batch, of which `batch` is this rank's share."""
        encoded = self.encode(batch, self.matches)
        plan = self.plan(encoded, batch, step)
        loss, sums = self.part(encoded, batch, plan, 0, 1.0)
        report = self.report(plan, sums)
        return {**report, "loss": report["loss"] + (loss - loss.detach())}  # the global value, this part's gradient

    def plan(self, encoded: Encoded, batch: Batch, step: int) -> Plan:
        """Share the embeddings with all ranks and take the contrastive gradient at them."""
        wide = torch.promote_types(encoded.image_nE.dtype, torch.float32)

        def leaf(value: Tensor) -> Tensor:
            return value.detach().to(wide).requires_grad_()

        image_nE, text_nE, scale = leaf(encoded.image_nE), leaf(encoded.text_nE), leaf(encoded.scale)
        shared = gather_batch(image_nE, text_nE, batch["ids"])
        with torch.enable_grad():
            if encoded.bias is None:
                leaves = [image_nE, text_nE, scale]
                loss = info_nce(image_nE, text_nE, scale, shared)
            else:
                leaves = [image_nE, text_nE, scale, leaf(encoded.bias)]
                loss = sigmoid_loss(image_nE, text_nE, scale, leaves[-1], shared)
            image_grad, text_grad, scale_grad, *bias_grad = torch.autograd.grad(self.weight * loss, leaves)
        figures = {"contrastive_loss": loss.detach(), "temperature": 1 / encoded.scale.detach()}
        if encoded.bias is not None:
            figures["logit_bias"] = encoded.bias.detach()
        return Plan(image_grad, text_grad, scale_grad, bias_grad[0] if bias_grad else None, figures, shared)

    def part(self, encoded: Encoded, batch: Batch, plan: Plan, low: int, share: float) -> tuple[Tensor, Tensor]:
        """A scalar whose gradient is that of a part of the batch, and the part's sums for `report`.

        Args:
            encoded, batch: the part, which begins at row `low` of this rank's share.
            share: the part's share of the gradient of temperature and bias, which belong to no row.
        """
        rows = slice(low, low + len(encoded.image_nE))
        pulled = (encoded.image_nE * plan.image_grad_nE[rows]).sum() + (
            encoded.text_nE * plan.text_grad_nE[rows]
        ).sum()
        pulled = pulled + share * plan.scale_grad * encoded.scale
        if encoded.bias is not None and plan.bias_grad is not None:
            pulled = pulled + share * plan.bias_grad * encoded.bias
        return pulled, pulled.new_zeros(0)

    def report(self, plan: Plan, sums: Tensor) -> Report:
        """What the trainer logs, from the sums of all this rank's parts."""
        return {"loss": self.weight * plan.figures["contrastive_loss"], **plan.figures}


class ContrastiveMatchingObjective(ContrastiveObjective):
    """The contrastive loss plus image-text matching with hard negatives of the global batch (ALBEF, arXiv 2107.07651).

    Each image is paired with a text, and each text with an image, that are not theirs, drawn by similarity. A pair is
    scored with its image, on the rank and in the part of the batch that owns it; only token ids travel, so the result
    depends neither on the number of ranks nor on that of the parts. The matching loss is the mean binary cross-entropy
    over all pairs of all ranks.
    """

    matches = True

    def __init__(self, model: FusionDualEncoderModel, weight: float, matching_weight: float, seed: int):
        super().__init__(model, weight)
        self.matching_weight, self.seed = matching_weight, seed

    def plan(self, encoded: Encoded, batch: Batch, step: int) -> Plan:
        """As for the contrastive loss; and the pairs to score, drawn by a generator keyed by `step`."""
        plan = super().plan(encoded, batch, step)
        plan.pairs = self._draw_pairs(plan.shared, encoded.scale.detach(), step)
        plan.input_ids = ranks.gather_ragged(batch["input_ids"], plan.shared.sizes)
        plan.attention_mask = ranks.gather_ragged(batch["attention_mask"], plan.shared.sizes)
        return plan

    def part(self, encoded: Encoded, batch: Batch, plan: Plan, low: int, share: float) -> tuple[Tensor, Tensor]:
        """The contrastive part, and the pairs whose image is in this part of the batch."""
        assert plan.pairs is not None
        loss, _ = super().part(encoded, batch, plan, low, share)
        image_P, text_P, is_match_P, total = plan.pairs
        here = (image_P >= low) & (image_P < low + len(encoded.image_nE))
        image_P, text_P, is_match_P = image_P[here] - low, text_P[here], is_match_P[here]
        states, mask, text_P = self._texts(text_P, batch, encoded, plan, low)
        logits_P = self._score(encoded.keys_values, states, mask, image_P, text_P).float()
        losses_P = F.binary_cross_entropy_with_logits(logits_P, is_match_P.to(logits_P.dtype), reduction="none")
        right = ((logits_P > 0) == is_match_P).sum()
        # The gradient of the sum over ranks, through an average over ranks.
        loss = loss + self.matching_weight * losses_P.sum() * (ranks.world_size() / total)
        return loss, torch.stack([losses_P.detach().sum(), right.to(losses_P.dtype)])

    def report(self, plan: Plan, sums: Tensor) -> Report:
        """Both losses, and how well pairs are told apart."""
        assert plan.pairs is not None
        matching, accuracy = ranks.sum_over_ranks(sums) / plan.pairs[3]
        return {
            **plan.figures,
            "loss": self.weight * plan.figures["contrastive_loss"] + self.matching_weight * matching,
            "matching_loss": matching,
            "matching_accuracy": accuracy,
            "matching_lift": MATCH_PRIOR_ENTROPY - matching,
        }

    def _draw_pairs(self, shared: GlobalBatch, scale: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The pairs whose image this rank owns: local image, global text, whether they match; and all ranks' count."""
        mine = slice(shared.offset, shared.offset + shared.sizes[ranks.rank()])
        key = 2 * (self.seed * 1_000_003 + step)
        chosen_texts = hard_negatives(shared.image_NE[mine], shared.text_NE, scale, shared, key)
        chosen_images = hard_negatives(shared.text_NE[mine], shared.image_NE, scale, shared, key + 1)
        text_N, image_N = ranks.gather(torch.stack([chosen_texts, chosen_images], 1), shared.sizes).unbind(1)
        own = torch.arange(mine.start, mine.stop, device=text_N.device)
        with_text = own[chosen_texts >= 0]
        here = ((image_N >= mine.start) & (image_N < mine.stop)).nonzero()[:, 0]
        image_P = torch.cat([own, with_text, image_N[here]]) - mine.start
        text_P = torch.cat([own, text_N[with_text], here])
        is_match_P = torch.arange(len(image_P), device=own.device) < len(own)
        total = len(text_N) + (text_N >= 0).sum() + (image_N >= 0).sum()
        return image_P, text_P, is_match_P, total.clamp(min=1)

    def _texts(
        self, text_P: Tensor, batch: Batch, encoded: Encoded, plan: Plan, low: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States and mask of this part's own texts and of those it needs from elsewhere, and `text_P` as places in them."""
        assert plan.input_ids is not None
        assert plan.attention_mask is not None
        own, first = len(encoded.image_nE), plan.shared.offset + low
        place_P = text_P - first
        foreign = (place_P < 0) | (place_P >= own)
        if own == len(plan.input_ids):
            return encoded.text_states, batch["attention_mask"], place_P
        # Every rank encodes at least one foreign text, because FSDP's ranks must run the same modules.
        any_text = text_P.new_zeros(1), text_P[:0]
        wanted, position = text_P[foreign].unique(return_inverse=True) if foreign.any() else any_text
        wanted_mask = plan.attention_mask[wanted]
        longest = max(1, int(wanted_mask.sum(1).max()))
        wanted_mask = wanted_mask[:, :longest]
        _, foreign_states = self.model.encode_text(plan.input_ids[wanted, :longest], wanted_mask)
        if "text_states" in batch:  # rounded as this rank's own are, which were stored
            foreign_states = foreign_states.to(batch["text_states"].dtype).to(encoded.text_states)
        width = max(longest, encoded.text_states.shape[1])
        parts = ((encoded.text_states[:own], batch["attention_mask"]), (foreign_states, wanted_mask))
        states = torch.cat([F.pad(states, (0, 0, 0, width - states.shape[1])) for states, _ in parts])
        mask = torch.cat([F.pad(mask, (0, width - mask.shape[1])) for _, mask in parts])
        return states, mask, place_P.masked_scatter(foreign, own + position)

    def _score(self, keys_values: KeysValues, states: Tensor, mask: Tensor, image_P: Tensor, text_P: Tensor) -> Tensor:
        """Match logits `[P]`; a rank without pairs scores one and drops it."""
        pairs = len(image_P)
        if not pairs:
            image_P = text_P = image_P.new_zeros(1)
            mask = mask.new_ones(1, states.shape[1])
        # index_select, because the backward of indexing adds in no fixed order on CPUs, and runs would not repeat
        keys_values = tuple(layer.index_select(1, image_P) for layer in keys_values)
        return self.model.match_pairs(keys_values, states.index_select(0, text_P), mask[text_P])[:pairs]


def _blank_pair(batch: Batch) -> Batch:
    """Stands in for an empty batch: backbones refuse those, and the other ranks wait for this one's gradients."""
    return {name: value.new_ones(1, *value.shape[1:]) for name, value in batch.items() if isinstance(value, Tensor)}


def build_objective(model: FusionDualEncoderModel, args: ObjectiveArguments, seed: int) -> Objective:
    """The objective that the arguments name. For the sigmoid loss, a model without a logit bias is given one.

    Raises:
        ValueError: if matching is wanted of a model without a fusion head.
    """
    weights = dict(args.weights)
    if "sigmoid" not in weights:
        model.remove_logit_bias()
    elif model.logit_bias is None:
        model.add_logit_bias()
    matching = weights.pop("matching", None)
    [weight] = weights.values()
    if matching is None:
        if model.fusion is not None:
            model.fusion.requires_grad_(False)  # nothing trains it, and DDP would wait for its gradients
        return ContrastiveObjective(model, weight)
    if model.fusion is None:
        raise ValueError(
            "--objectives asks for matching, and the model has no fusion head. Set --fusion_layers above 0."
        )
    return ContrastiveMatchingObjective(model, weight, matching, seed)
