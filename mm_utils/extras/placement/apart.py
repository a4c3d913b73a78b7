"""The objective whose encoders are on different processes.

A process has the images, or the texts, of some rows. The embeddings of all rows are shared, as ever; then every process
computes the loss of its part of the pairs, both directions of it, and the gradient at their embeddings; these gradients are
shared too, and each process takes those of its own rows. So every pair is counted once, the loss is divided evenly however
the encoders are, and its code is that of any other run.

In a step, the processes of the images send the tokens of their rows: of an unreadable image's row, which another row
replaces, the others would not know. Gradients are summed among the processes of an encoder alone. Before an evaluation and
before a checkpoint, every process gets the weights and averages of the encoder that it does not train; before a checkpoint also
its moments.

Shape letters: n this process's rows, N the global batch, L tokens, E embedding width.
"""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from mm_utils import distributed
from mm_utils.extras.placement.split import PARTS, Split, loss_rows, parameters_of
from mm_utils.model.row_noise import set_row_keys
from mm_utils.objectives.encoding import encode_in_groups
from mm_utils.objectives.joint import JointObjective, Objective, blank_pair, leaf
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.ranks import GradientAverage, has_shared_ids
from mm_utils.objectives.terms import Batch, EncodedBatch, LossInputs, Plan


@dataclass
class Dealt:
    """What all processes know of a step's batch before they encode it.

    Attributes:
        ids_N2: the image id and caption id of every pair.
        images: how many images each process has.
        order: of a process with texts, the place among its own rows of each row of its batch, `[n]`.
    """

    ids_N2: Tensor
    images: list[int]
    order: Tensor | None


class ApartObjective(JointObjective):
    """Contrastive terms, whose images and texts are encoded on different processes.

    Args:
        joint: the objective of one process.
        split: which processes have which encoder.
        pad_token_id: the tokenizer's.
    """

    def __init__(self, joint: JointObjective, split: Split, pad_token_id: int):
        super().__init__(joint.model, joint.weights)
        self.split, self.pad_token_id = split, pad_token_id
        self.group = distributed.make_groups((split.vision, split.text))
        self._stale: set[str] = set()
        self._dealt: Dealt | None = None

    def deal(self, batch: Batch) -> Batch:
        """Send tokens and ids of all rows; return this process's images, or texts, longest first."""
        device = batch["ids"].device
        lengths_n1 = torch.tensor(batch["lengths"], dtype=torch.long, device=device).view(-1, 1)
        images = distributed.gather_sizes(len(lengths_n1), device)
        rows_n = torch.cat([batch["ids"], lengths_n1, batch["input_ids"]], 1)
        rows_N = distributed.gather_ragged(rows_n, images, self.pad_token_id)
        self._dealt = Dealt(rows_N[:, :2], images, None)
        if self.split.mine == "vision":
            return batch
        mine = self.split.text_rows(len(rows_N))[distributed.rank()]
        rows_n = rows_N[mine.start : mine.stop]
        self._dealt.order = rows_n[:, 2].argsort(descending=True, stable=True)
        rows_n = rows_n[self._dealt.order]
        lengths = rows_n[:, 2].tolist()
        input_ids = rows_n[:, 3 : 3 + max(lengths, default=1)]
        mask = torch.arange(input_ids.shape[1], device=device) < rows_n[:, 2:3]
        return {"ids": rows_n[:, :2], "input_ids": input_ids, "attention_mask": mask.long(), "lengths": lengths}

    def with_keys(self, batch: Batch, step: int) -> Batch:
        """Begin a step; `deal` has called the roll."""
        return Objective.with_keys(self, batch, step)

    def encode(self, batch: Batch, for_backward: bool = True) -> EncodedBatch:
        """Run this process's encoder on a part of its batch."""
        own, mine = len(batch["ids"]), self.split.mine
        if not own:
            batch = blank_pair(batch)
        embed_nE = embed(self, mine, batch)
        embeds = {"image" if mine == "vision" else "text": embed_nE[:own]}
        return EncodedBatch(embeds, self.model.logit_scale.exp(), self.model.logit_bias, embed_nE[:0], ())

    def plan(self, encoded: EncodedBatch, batch: Batch, step: int) -> Plan:
        """Share the embeddings, take the gradient at a part of the pairs, and share that."""
        dealt = self._dealt
        assert dealt is not None
        [(name, own_nE)] = encoded.embeds.items()
        own_nE = leaf(own_nE).detach()
        if dealt.order is not None:
            own_nE = torch.empty_like(own_nE).index_copy_(0, dealt.order, own_nE)
        total = len(dealt.ids_N2)
        sizes = [images + len(texts) for images, texts in zip(dealt.images, self.split.text_rows(total), strict=True)]
        everyone = distributed.gather(own_nE, sizes)
        image_NE, text_NE = everyone[:total], everyone[total:]
        shares = loss_rows(total)
        low, stop = shares[distributed.rank()].start, shares[distributed.rank()].stop
        counts = list(map(len, shares))
        shared = GlobalBatch(image_NE, text_NE, dealt.ids_N2, counts, low, bool(has_shared_ids(dealt.ids_N2)))
        rows = {"image": leaf(image_NE[low:stop]), "text": leaf(text_NE[low:stop])}
        bias = None if encoded.bias is None else leaf(encoded.bias)
        plan = self.plan_embeddings(LossInputs(rows, leaf(encoded.scale), bias), shared)
        found = [torch.zeros_like(rows[side]) if each is None else each for side, each in plan.gradients.items()]
        image_NE, text_NE = distributed.gather(torch.stack(found, 1), counts).unbind(1)
        before = sum(sizes[: distributed.rank()])
        mine_nE = torch.cat([image_NE, text_NE])[before : before + len(own_nE)]
        plan.gradients = {name: mine_nE if dealt.order is None else mine_nE[dealt.order]}
        return plan

    def gradient_average(self) -> GradientAverage:
        """Return what averages an encoder's gradients among its processes, others among all."""
        self._stale = {"weights", "moments"}
        owned = ((self.split.mine, self.group), (None, None))
        return GradientAverage(*(((p for _, p in parameters_of(self.model, own)), group) for own, group in owned))

    def clip_gradients(self, accelerator: Accelerator, max_norm: float) -> Tensor:
        """Clip the norm of both encoders' gradient; return what it was, the same everywhere."""
        rank, mine = distributed.rank(), self.split.mine
        counted = [mine] if rank == self.split.first[mine] else []
        gradients = [
            parameter.grad
            for encoder in [*counted, *([None] if rank == 0 else [])]
            for _, parameter in parameters_of(self.model, encoder)
            if parameter.grad is not None
        ]
        square = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        if gradients:
            square += nn.utils.get_total_norm(gradients).double() ** 2
        norm = distributed.sum_over_ranks(square).sqrt().to(self.model.dtype)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    @torch.no_grad()
    def exchange(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Copy both encoders to every process; with an optimizer, its moments too.

        That is their weights, running statistics and averages, if they have changed.
        """
        due = self._stale - ({"moments"} if optimizer is None else set())
        for encoder, source in self.split.first.items() if due else ():
            trained = dict(parameters_of(self.model, encoder))
            tensors: list[Tensor] = []
            if "weights" in due:
                tensors += trained.values()
                tensors += [value for part in PARTS[encoder] for value in getattr(self.model, part).buffers()]
                tensors += [self.average.values[name] for name in trained] if self.average is not None else []
            if "moments" in due and optimizer is not None:
                tensors += moments(optimizer, trained, source)
            distributed.broadcast(tensors, source, self.model.device)
        self._stale -= due


def embed(objective: JointObjective, encoder: str, batch: Batch) -> Tensor:
    """Return the unit embeddings `[n, E]` of a batch's images, or of its texts."""
    model = objective.model
    set_row_keys(model, batch.get("row_keys"))
    if encoder == "vision":
        return model.encode_image(batch["pixel_values"], with_keys_values=False)[0]
    lengths = batch.get("lengths") if objective.groups_texts else None
    return encode_in_groups(model, batch["input_ids"], batch["attention_mask"], lengths, with_states=False)[0]


def moments(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter], source: int) -> list[Tensor]:
    """Return the optimizer's state of parameters, made where a process has none.

    Called on all processes, whose results are in the same order.

    Args:
        optimizer: the optimizer.
        trained: the parameters, by name.
        source: the process that has their state.
    """
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in trained.items()}
    mine = {name: {key: (value.shape, value.dtype) for key, value in state.items()} for name, state in states.items()}
    shapes = gather_object([mine])[source]
    found = []
    for name, state in shapes.items():
        for key, (shape, dtype) in state.items():
            held = optimizer.state[trained[name]]
            if key not in held:
                held[key] = torch.zeros(shape, dtype=dtype, device=trained[name].device)
            found.append(held[key])
    return found
