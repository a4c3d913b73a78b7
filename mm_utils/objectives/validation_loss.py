"""The contrastive loss of a validation split, from the embeddings that retrieval was measured with."""

from collections.abc import Iterable
from statistics import mean

import torch
from accelerate import Accelerator

from mm_utils import distributed
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.contrastive import InfoNCE, PairwiseSigmoid
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import Encoded, Term
from mm_utils.sharding import full_tensor


class ValidationLoss:
    """Measure `loss`: the contrastive or sigmoid term over the split, in batches of the run's size; nothing without such a term.

    An image counts with its first caption. The order of the images is drawn once; the last batch reaches back for what it
    lacks, so that all are of one size, on which the loss depends. It is the same on any number of processes.

    Args:
        retrieval: an evaluator that was called before, with the same model.
        batch_size: pairs of a batch; of a smaller split, all are one batch.
    """

    reads_features = True

    def __init__(self, terms: Iterable[Term], retrieval: RetrievalEvaluator, batch_size: int):
        self.term = next((term for term in terms if isinstance(term, InfoNCE | PairwiseSigmoid)), None)
        self.retrieval = retrieval
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Measure the embeddings that `retrieval` holds."""
        if self.term is None:
            return {}
        split = self.retrieval.split
        images = len(split.image_ME)
        captions = torch.arange(len(split.text_TE), device=split.text_TE.device)
        # the first caption of an image is the one with the smallest place
        first_M = split.rows_M.new_zeros(images).scatter_reduce(0, split.owner_T, captions, "amin", include_self=False)
        captions_T = captions if split.text_key_T is None else split.text_key_T
        ids_M2 = torch.stack([split.image_key_M, captions_T[first_M]], 1)
        scale = full_tensor(model.logit_scale.detach()).float().exp().squeeze()
        bias = None
        if model.logit_bias is not None:
            bias = full_tensor(model.logit_bias.detach()).float().squeeze()
        order_M = torch.randperm(images, generator=torch.Generator().manual_seed(0)).to(first_M.device)
        size = min(self.batch_size, images)
        world = distributed.world_size()
        losses = list[float]()
        shares = [distributed.share(size, rank, world) for rank in range(world)]
        mine = slice(shares[distributed.rank()].start, shares[distributed.rank()].stop)
        for low in range(0, images, size):
            part = order_M[min(low, images - size) :][:size]
            image = split.image_ME[part]
            text = split.text_TE[first_M[part]]
            ids = ids_M2[part]
            batch = GlobalBatch(image, text, ids, list(map(len, shares)), mine.start, split.text_key_T is not None)
            own = Encoded({"image": image[mine], "text": text[mine]}, scale, bias)
            losses.append(self.term.loss(own, batch).item())
        return {"loss": mean(losses)}
