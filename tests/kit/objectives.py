"""An objective of every kind on a model of a few channels, the same in every process, and the definitions of its losses."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, normalize, softplus
from transformers import AutoConfig, AutoModel

from mm_utils import distributed
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.model.fusion import TokenHead
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives import EmbeddingTerm
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.contrastive import Distillation
from mm_utils.objectives.grad_cache import backward
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.objective import JointObjective, Objective
from mm_utils.training.objective_cache import initialise_fsdp_root, make_shardable


def other_positives_of(ids: Tensor) -> Tensor:
    return (ids[:, None] == ids).any(-1).fill_diagonal_(False)


def dense_info_nce(image: Tensor, text: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """The definition, with every matrix in memory."""
    logits = (scale * image @ text.T).masked_fill(other_positives_of(ids), -torch.inf)
    target = torch.arange(len(logits))
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def dense_sigmoid(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """The definition, with every matrix in memory."""
    signs = 2 * torch.eye(len(ids), dtype=image.dtype) - 1
    losses = softplus(-signs * (scale * image @ text.T + bias), threshold=40)
    return losses.masked_fill(other_positives_of(ids), 0).sum() / len(ids)


PAIRS = 9
SPLITS = {2: [(5, 4), (8, 1), (9, 0)], 3: [(3, 3, 3), (2, 6, 1), (0, 5, 4)]}
TERMS = {
    "contrastive": "contrastive:1",
    "contrastive_matching": "contrastive:1,matching:0.7",
    "sigmoid": "sigmoid:1",
    "sigmoid_matching": "sigmoid:1,matching:0.7",
    "matching_with_negatives": "contrastive:1,matching:0.7",
    "captioning": "contrastive:1,captioning:0.5",
    "captioning_on_resting_towers": "contrastive:1,captioning:0.5",
    "captioning_of_few_words": "contrastive:1,captioning:0.5",
    "regions": "contrastive:1,regions:0.5",
    "moments": "contrastive:1,moments:0.5",
    "distillation": "contrastive:1,distillation:0.5",
    "mlp": "contrastive:1,matching:0.7,distillation:0.5",
    "own": "contrastive:1,tests.kit.objectives.Uniformity:0.3",
    "everything": "sigmoid:1,matching:0.7,captioning:0.3,distillation:0.5",
}
KINDS = tuple(TERMS)


def tiny_model(fusion_layers: int = 2, projection: str = "linear") -> FusionDualEncoderModel:
    """A ConvNeXt and a BERT of a few channels, in fp64, without dropout; the same one in every process."""
    torch.manual_seed(0)
    vision = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "image_size": 16}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = join_backbones(
        AutoModel.from_config(AutoConfig.for_model("convnext", **vision)),
        AutoModel.from_config(AutoConfig.for_model("bert", **text, **dropout, vocab_size=50)),
        fusion_layers=fusion_layers,
        projection=projection,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that each has something to say
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.double().train()


def tiny_objective(kind: str) -> JointObjective:
    teacher = "larger" if "distillation" in TERMS[kind] else None
    args = ObjectiveArguments(TERMS[kind], teacher)
    model = tiny_model(
        fusion_layers=2 if set(args.weights) & {"matching", "captioning", "regions", "moments"} else 0,
        projection="mlp" if kind == "mlp" else "linear",
    )
    objective = build_objective(model, args, 3)
    model.double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        if model.logit_bias is not None:
            model.logit_bias.fill_(-2.0)  # at -10, the gradient of most pairs is too small to be compared
            model.logit_scale.fill_(tiny_model().logit_scale)
        for name, parameter in model.named_parameters():
            if name.startswith(("token_head", "caption_adapter", "region_head")):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    for term in objective.weights:
        if isinstance(term, Distillation):
            term.scale = 4.0
    if kind == "captioning_of_few_words" and model.token_head is not None:
        model.token_head.bias.data[40:] = TokenHead.ABSENT
    if kind == "captioning_on_resting_towers":
        model.vision_model.requires_grad_(False)
        model.text_model.requires_grad_(False)
    return objective


def global_batch(kind: str = "") -> dict[str, Any]:
    """Two pairs share an image, two others a caption. Images have up to three captions and two regions, and a teacher's embeddings.

    Negatives, of which two images have none, are for the kind that has them.
    """
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([3, 11, 4, 5, 9, 3, 7, 6, 10])
    captions = torch.stack([lengths, lengths.roll(1), lengths.roll(2)], 1)
    captions[::2, 1:] = 0
    captions[3, 2] = 0
    phrases = torch.randint(1, 5, (PAIRS, 3), generator=generator)
    phrases[2] = 0
    phrases[:, 2] = 0
    texts = {"": (lengths, 16), "all_": (captions, 16), "region_": (phrases, 4)}
    texts |= {"negative_": (torch.tensor([4, 0, 13, 1, 2, 9, 5, 0, 6]), 13)} if "negatives" in kind else {}
    ids = torch.arange(2 * PAIRS).view(PAIRS, 2)
    ids[7, 0] = ids[1, 0]
    ids[6, 1] = ids[3, 1]
    batch = {
        "pixel_values": torch.randn(PAIRS, 3, 16, 16, generator=generator, dtype=torch.double),
        "ids": ids,
        "lengths": lengths.tolist(),
        "all_lengths": captions.tolist(),
        "region_boxes": torch.rand(PAIRS, 3, 2, 2, generator=generator).sort(2).values.flatten(2),
        "region_keys": torch.arange(3 * PAIRS).view(PAIRS, 3),
    }
    for name, (tokens, longest) in texts.items():
        mask = (torch.arange(longest) < tokens[..., None]).long()
        batch[f"{name}input_ids"] = torch.randint(1, 50, mask.shape, generator=generator) * mask
        batch[f"{name}attention_mask"] = mask
    for side in ("image", "text"):  # unit embeddings of another width
        batch[f"teacher_{side}"] = normalize(torch.randn(PAIRS, 7, generator=generator, dtype=torch.double), dim=1)
    return batch


def share_of(batch: dict[str, Any], low: int, high: int) -> dict[str, Any]:
    """Rows `low` to `high`, cut to their own longest caption, as a rank's collator would."""
    mine = {name: value[low:high] for name, value in batch.items()}
    longest = max(mine["lengths"], default=1)
    return mine | {name: mine[name][:, :longest] for name in ("input_ids", "attention_mask")}


def step(objective: Objective, batch: dict[str, Tensor], number: int) -> dict[str, Any]:
    """Reported values and gradients of one step."""
    objective.zero_grad(set_to_none=True)
    report = objective(batch, number)
    report["loss"].backward()
    return measured(objective, report)


ALONE = SimpleNamespace(
    device=torch.device("cpu"),
    backward=lambda loss: loss.backward(),
    no_sync=lambda model: nullcontext(),
    unwrap_model=lambda model: model,
    autocast=nullcontext,
    distributed_type=None,
)


def step_in_parts(
    objective: Objective, batch: dict[str, Any], micro_batch_size: int | None, seed: int = 0
) -> dict[str, Any]:
    torch.manual_seed(seed)
    return measured(objective, backward(ALONE, objective, batch, 5, micro_batch_size))


def measured(objective: Objective, report: dict[str, torch.Tensor]) -> dict[str, Any]:
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in objective.named_parameters()
    }
    return {"report": {name: value.item() for name, value in report.items()}, "gradients": gradients}


def assert_same(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found["report"] == pytest.approx(right["report"], rel=1e-6, abs=3e-7)
    same_gradients(found["gradients"], right["gradients"])


def same_gradients(found: dict[str, Tensor], right: dict[str, Tensor], of_largest: float = 1e-8) -> None:
    """Compare those that are expected; the head's logits are rounded to fp32 on purpose, all else is fp64."""
    largest = float(max(gradient.abs().max() for gradient in right.values()))
    for name, gradient in right.items():
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=of_largest * largest, msg=message)


class Uniformity(EmbeddingTerm):
    """The example of the README (arXiv 2005.10242)."""

    def of_batch(self, image_NE: Tensor, text_NE: Tensor, scale: Tensor, batch: GlobalBatch) -> Tensor:
        return torch.pdist(image_NE).square().mul(-2).exp().mean().log() + 0.1 * scale.log()


def sharded(objective: JointObjective) -> JointObjective:
    make_shardable(objective)
    objective.groups_texts = False
    mesh = init_device_mesh("cpu", (distributed.world_size(),))
    model = objective.model
    layers = model.fusion.layers if model.fusion is not None else ()
    for part in (model.vision_model, model.text_model, *layers, objective):
        fully_shard(part, mesh=mesh)
    initialise_fsdp_root(objective)
    return objective
