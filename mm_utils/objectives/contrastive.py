"""Contrastive terms: over pairs of the batch, altered captions, cells of an image, and time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from mm_utils import distributed
from mm_utils.copies import to_device
from mm_utils.data.batches.tokens import pad_captions
from mm_utils.extras.grounding.regions import regions_of
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, cells_covered
from mm_utils.objectives.losses import GlobalBatch, distilled_info_nce, info_nce, sigmoid_loss
from mm_utils.objectives.padding import encode_in_groups
from mm_utils.objectives.terms import Batch, EmbeddingTerm, EncodedBatch, LossInputs, Report, RowPlan, RowTerm


class Contrastive(EmbeddingTerm):
    """The loss of all pairs, averaged over widths (Matryoshka, arXiv 2205.13147).

    The first d numbers of an embedding, at unit length again, are an embedding of width d. All widths share the temperature
    and weigh the same.

    Attributes:
        widths: widths besides the full one; with none, the loss is that of the full width.
    """

    def __init__(self, seed: int = 0, widths: Sequence[int] = ()):
        super().__init__(seed)
        self.widths = widths

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Raise ValueError if a width is not below the model's."""
        full = model.config.projection_dim
        if wrong := [width for width in self.widths if width >= full]:
            raise ValueError(
                f"--matryoshka_dims has {wrong[0]}; the embeddings have {full} numbers, and that width is always trained. Give "
                "smaller ones, or raise --projection_dim."
            )

    def loss(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        losses = [self.of_width(own, batch), *(self.of_width(*first_numbers(own, batch, d)) for d in self.widths)]
        return torch.stack(losses).mean()

    def of_width(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Return the loss of embeddings of one width."""
        raise NotImplementedError


def first_numbers(own: LossInputs, batch: GlobalBatch, width: int) -> tuple[LossInputs, GlobalBatch]:
    """Return a loss's inputs, each embedding cut to `width` numbers, at unit length."""

    def cut(embeds: Tensor) -> Tensor:
        return normalize(embeds[:, :width], dim=1)

    shorter = replace(own, embeds={side: cut(own.embeds[side]) for side in ("image", "text")})
    return shorter, replace(batch, image_NE=cut(batch.image_NE), text_NE=cut(batch.text_NE))


class InfoNCE(Contrastive):
    """A softmax over the batch, both ways (CLIP, arXiv 2103.00020); see `losses.info_nce`."""

    name = "contrastive"

    def of_width(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Return the loss of embeddings of one width."""
        return info_nce(own.embeds["image"], own.embeds["text"], own.scale, batch)

    def metrics(self, value: Tensor, own: LossInputs) -> Report:
        """Log the loss and the temperature."""
        return {"contrastive_loss": value, "temperature": 1 / own.scale.detach()}


class PairwiseSigmoid(Contrastive):
    """A binary loss for every pair (SigLIP, arXiv 2303.15343); see `losses.sigmoid_loss`."""

    name = "sigmoid"

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Add the bias that this loss starts from, if the model has none."""
        super().prepare(model)
        if model.logit_bias is None:
            model.add_logit_bias()

    def of_width(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Return the loss of embeddings of one width."""
        assert own.bias is not None
        return sigmoid_loss(own.embeds["image"], own.embeds["text"], own.scale, own.bias, batch)

    def metrics(self, value: Tensor, own: LossInputs) -> Report:
        """Log the loss, the temperature and the bias."""
        assert own.bias is not None
        scalars = {"temperature": 1 / own.scale.detach(), "logit_bias": own.bias.detach()}
        return {"contrastive_loss": value, **scalars}


class SelfDistillation(EmbeddingTerm):
    """InfoNCE towards the weight average's soft targets (ALBEF, arXiv 2107.07651).

    Captions of web pairs often fit other images too; a hard target calls all of those wrong. ALBEF's weights are
    contrastive:0.6,self_distillation:0.4 with an `--ema_decay` of 0.995. It costs a forward pass of both towers.
    """

    name = "self_distillation"
    needs_teacher = True

    def loss(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        teacher = (own.embeds["teacher_image"], own.embeds["teacher_text"])
        return distilled_info_nce(own.embeds["image"], own.embeds["text"], own.scale, *teacher, batch)


class Distillation(EmbeddingTerm):
    """InfoNCE towards the soft targets of another model, a teacher (TinyCLIP, arXiv 2309.12314).

    Its unit embeddings of the images as evaluation sees them, and of the captions, are computed before training
    (`mm_utils.extras.frozen.teacher`) and are in the batch as `teacher_image` and `teacher_text`, `[n, width of the teacher]`.

    Attributes:
        scale: the teacher's own inverse temperature, of its softmax; set with the embeddings.
    """

    name = "distillation"
    scale: float | None = None

    def embed(self, model: FusionDualEncoderModel, encoded: EncodedBatch, batch: Batch) -> dict[str, Tensor]:
        """Return the teacher's embeddings."""
        return {f"distillation_{side}": batch[f"teacher_{side}"] for side in ("image", "text")}

    def loss(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        teacher = (own.embeds["distillation_image"], own.embeds["distillation_text"])
        student = (own.embeds["image"], own.embeds["text"], own.scale)
        return distilled_info_nce(*student, *teacher, batch, teacher_scale=self.scale)


@dataclass
class AlteredPlan(RowPlan):
    """The altered captions of each of this rank's rows, as tokens."""

    captions: list[list[list[int]]]


class Altered(RowTerm):
    """Each image chooses its caption among altered ones: a softmax at the towers' temperature.

    Altered captions are NegCLIP's hard negatives (arXiv 2210.01936). There they join the negatives of the whole batch; here
    every image is compared with its own, which are the hard ones, so nothing is exchanged between ranks. The temperature
    is left to the contrastive loss. A caption that has nothing to alter counts as no row.

    Args:
        alter: returns the altered captions of a caption, all as tokens.
    """

    name = "altered"
    reads_tokens = True

    def __init__(self, alter: Callable[[tuple[int, ...]], list[list[int]]], seed: int = 0):
        super().__init__(seed)
        self.alter = alter

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> AlteredPlan:
        """Alter this rank's captions; count those of all ranks that can be."""
        captions = zip(batch["tokens"].tolist(), batch["lengths"], strict=True)
        found = [self.alter(tuple(ids[:length])) for ids, length in captions]
        rows = to_device(np.array(sum(map(bool, found))), scale.device)
        return AlteredPlan(distributed.sum_over_ranks(rows).clamp(min=1), found)

    def part(
        self,
        model: FusionDualEncoderModel,
        encoded: EncodedBatch,
        batch: Batch,
        plan: AlteredPlan,
        shared: GlobalBatch,
        start_row: int,
    ) -> tuple[Tensor, Tensor]:
        """Compare this part's images with their captions and the altered ones."""
        altered = plan.captions[start_row : start_row + len(encoded)]
        rows = [row for row, captions in enumerate(altered) if captions]
        texts = [(ids, place, k) for place, row in enumerate(rows) for k, ids in enumerate(altered[row])]
        # Every rank encodes at least one text, because FSDP's ranks must run the same modules.
        tokens, *places = zip(*sorted(texts, key=lambda text: -len(text[0])) or [([0], 0, 0)], strict=True)
        device = encoded.scale.device
        input_ids, mask = (to_device(each.numpy(), device) for each in pad_captions(tokens, 0))
        lengths = list(map(len, tokens)) if batch["lengths"] else None
        altered_AE, _ = encode_in_groups(model, input_ids, mask, lengths, with_states=False)
        if not texts:
            return 0 * altered_AE.sum(), altered_AE.new_zeros(())
        row_R, place_A, k_A = (to_device(np.array(each), device) for each in (rows, *places))
        # index_select, because the backward of indexing adds in no fixed order on CPUs
        image_AE, text_AE = (
            encoded.embeds[side].index_select(0, row_R).index_select(0, place_A) for side in ("image", "text")
        )
        wide = torch.promote_types(altered_AE.dtype, torch.float32)
        margin_A = encoded.scale.detach() * (image_AE * (altered_AE - text_AE)).sum(1, dtype=wide)
        margin_RK = margin_A.new_full((len(rows), max(places[1]) + 1), -torch.inf)
        margin_RK = margin_RK.index_put((place_A, k_A), margin_A)
        losses_R = softplus(margin_RK.logsumexp(1), threshold=40)  # log(1 + sum_k exp margin_k)
        return losses_R.sum(), (margin_RK < 0).all(1).sum()


class RegionPointing(RowTerm):
    """Each phrase points at a cell of its own image's grid, and should hit its box.

    loss = -log sum_c in(c) softmax_c(scale <phrase, cell c>): the negative log probability that a random point of the cell
    pointed at lies in the box, where in(c) is the share of cell c that does. The temperature is that of the towers, and
    left to the contrastive loss.

    On the embedded scenes, after 100 steps of 128 pairs, 99 % of the phrases of unseen images point into their box;
    contrasting box and phrase over the global batch (X-VLM, arXiv 2111.08276) instead gave 82 %, and chance is 10 %.
    """

    name = "regions"
    heads = ("region_head",)
    reads_taps = True
    reads_regions = True

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Add embeddings of the grid's cells to the model."""
        model.add_region_head()

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> RowPlan:
        """Count the phrases of all ranks."""
        return RowPlan(distributed.sum_over_ranks(batch["region_attention_mask"].any(-1).sum()).clamp(min=1))

    def part(
        self,
        model: FusionDualEncoderModel,
        encoded: EncodedBatch,
        batch: Batch,
        plan: RowPlan,
        shared: GlobalBatch,
        start_row: int,
    ) -> tuple[Tensor, Tensor]:
        """Score the phrases of this part; right is one whose cell lies mostly in its box."""
        regions, count = regions_of(batch)
        cells_nhwE = model.cell_embeds(encoded.taps)
        phrase_RE, _ = model.encode_text(regions.input_ids, regions.attention_mask)
        # index_select, because the backward of indexing adds in no fixed order on CPUs
        cells_RcE = cells_nhwE.flatten(1, 2).index_select(0, regions.image)
        wide = torch.promote_types(phrase_RE.dtype, torch.float32)
        logits_Rc = encoded.scale.detach() * torch.einsum("re,rce->rc", phrase_RE, cells_RcE).to(wide)
        inside_Rc = cells_covered(regions.boxes, *cells_nhwE.shape[1:3]).flatten(1).to(wide)
        losses_R = self.losses(logits_Rc, inside_Rc)
        correct_R = inside_Rc.gather(1, logits_Rc.argmax(1, keepdim=True))[:, 0] > 0.5
        return losses_R[:count].sum(), correct_R[:count].sum()

    def losses(self, logits_Rc: Tensor, inside_Rc: Tensor) -> Tensor:
        """Return each phrase's loss `[R]`, from its logits over cells and their shares in its box."""
        return -(logits_Rc.log_softmax(1) + inside_Rc.log()).logsumexp(1)


class MomentCovering(RegionPointing):
    """Each phrase points at its moment, and covers it from its start to its end: half of either.

    The second half is the cross-entropy against the uniform distribution over the span, -sum_c in(c) / sum_k in(k) log p(c).
    Pointing alone is content with the loudest cell, and its profile over time is a peak from which no span can be read: in a
    trial with 24 cells on tracks of 8 seconds, half and half found 0.31 of the spans with an overlap (IoU) of 0.7, pointing
    alone 0.21.
    """

    name = "moments"

    def losses(self, logits_Rc: Tensor, inside_Rc: Tensor) -> Tensor:
        """Return the mean of both losses of each phrase."""
        target_Rc = inside_Rc / inside_Rc.sum(1, keepdim=True)
        covering_R = -(target_Rc * logits_Rc.log_softmax(1)).sum(1)
        return (super().losses(logits_Rc, inside_Rc) + covering_R) / 2
