"""Trace the towers and the fusion head of a model to ONNX, with torch's own exporter, and compare them with torch.

Every graph takes any number of images or texts, and texts of any length; a text tower that reads padding (SigLIP's) takes texts
of its one length.

"Images" in names are the media of the model: of clips `[K, T, 3, S, S]`, of sounds what the feature extractor makes of samples.

Shape letters: K images, T texts, L tokens, E embedding width.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import pad

from mm_utils.distributed import RunError
from mm_utils.model.fusion import target_mask
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, input_name, input_shape
from mm_utils.text import one_line

OPSET = 18  # of ONNX's operators: the least that torch writes; onnxruntime reads it since 1.14 (February 2023)
MOST_DIFFERENCE = 1e-5  # of an fp32 embedding; of the head's term, as a share of the largest where that is above 1
# The sizes of the traced inputs; none is 1, which the exporter would take for a constant.
IMAGES, TEXTS, LENGTH = 3, 2, 7


class Graph(NamedTuple):
    """A part of a model and how it is traced."""

    module: nn.Module
    inputs: dict[str, Any]  # tensors by name, or a list of tensors for the last one
    axes: tuple[Any, ...]  # of each input that may vary, as `torch.export` wants them
    outputs: list[str]


class _Part(nn.Module):
    def __init__(self, model: FusionDualEncoderModel):
        super().__init__()
        self.model = model


class ImageTower(_Part):
    """`[K, 3, S, S]` -> unit embeddings `[K, width]`, with zeros after the first E numbers."""

    def __init__(self, model: FusionDualEncoderModel, width: int | None = None):
        super().__init__(model)
        self.zeros = (width or model.config.projection_dim) - model.config.projection_dim

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Embed images."""
        return pad(self.model.encode_image(pixel_values, with_keys_values=False)[0], (0, self.zeros))


class TextTower(_Part):
    """Ids and mask, int64 `[T, L]` -> unit embeddings `[T, E]`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed texts."""
        return self.model.encode_text(input_ids, attention_mask, with_states=False)[0]


class PaddedTextTower(_Part):
    """Ids without a mask, int32 `[T, L]` -> unit embeddings `[T, width]`, zeros after E.

    Args:
        model: the model.
        pad_token_id: the token that fills texts at the end.
        ends_in_pad: whether every text itself ends in that token, as CLIP's do.
        width: numbers of the result.
    """

    def __init__(self, model: FusionDualEncoderModel, pad_token_id: int, ends_in_pad: bool, width: int):
        super().__init__(model)
        self.pad_token_id, self.ends_in_pad = pad_token_id, ends_in_pad
        self.zeros = width - model.config.projection_dim

    def forward(self, text: Tensor) -> Tensor:
        """Embed texts."""
        is_pad = text == self.pad_token_id
        mask = (~is_pad).long()
        if self.ends_in_pad:
            mask = ((is_pad.long().cumsum(1) - is_pad.long()) == 0).long()
        return pad(self.model.encode_text(text.long(), mask, with_states=False)[0], (0, self.zeros))


class ImageSide(_Part):
    """`[K, 3, S, S]` -> the head's keys and values, one tensor per block with the images first."""

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        """Compute the image side of the head."""
        _, keys_values = self.model.encode_image(pixel_values)
        assert keys_values is not None
        return tuple(block.transpose(0, 1) for block in keys_values)


class Head(_Part):
    """Ids and mask `[T, L]`, images' keys and values -> what is added to cosines, `[T, K]`.

    Args:
        model: the model.
        weights: what each score of the head is multiplied by, as in `config.rerank_weights`.
    """

    def __init__(self, model: FusionDualEncoderModel, weights: dict[str, float]):
        super().__init__(model)
        self.weights = weights

    def forward(self, input_ids: Tensor, attention_mask: Tensor, keys_values: list[Tensor]) -> Tensor:
        """Score all pairs of a text and an image; a text goes through its tower once."""
        texts, images = input_ids.shape[0], keys_values[0].shape[0]
        blocks = tuple(
            block.transpose(0, 1)[:, None].expand(-1, texts, *[-1] * (block.dim() - 1)).flatten(1, 2)
            for block in keys_values
        )

        def for_each_image(rows: Tensor) -> Tensor:
            return rows[:, None].expand(-1, images, *rows.shape[1:]).flatten(0, 1)

        mask, scores = for_each_image(attention_mask), []
        if self.weights.get("match"):
            states = for_each_image(self.model.encode_text(input_ids, attention_mask)[1])
            scores.append(self.weights["match"] * self.model.match_pairs(blocks, states, mask))
        if self.weights.get("caption"):
            scores.append(self.weights["caption"] * self._caption_scores(blocks, for_each_image(input_ids), mask))
        return torch.stack(scores).sum(0).unflatten(0, (texts, images))

    def _caption_scores(self, keys_values: tuple[Tensor, ...], input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return what `FusionDualEncoderModel.caption_scores` does, without choosing rows by a mask."""
        model = self.model
        assert model.token_head is not None
        words = model.text_model.get_input_embeddings()
        states = model.caption_states(keys_values, input_ids, attention_mask)[:, :-1]
        log_probs = model.token_head(states, words.weight).log_softmax(-1)
        of_next, known = log_probs.gather(-1, input_ids[:, 1:, None])[..., 0], model.token_head.known()
        of_next = torch.where(known[input_ids[:, 1:]], of_next, -known.sum().log())
        return (of_next * target_mask(attention_mask)[0][:, 1:]).sum(1)


@torch.no_grad()
def graphs_of(
    model: FusionDualEncoderModel,
    weights: dict[str, float],
    shape: Sequence[int] | None = None,
    immich: tuple[int, bool, int] | None = None,
) -> dict[str, Graph]:
    """Return the graphs of the two towers, with the input and output names of CLIP in ONNX, and of the head.

    Args:
        model: the model.
        weights: of the head's scores; empty for no head.
        shape: of a clip or a sound, as its tower takes it; None for images. The input has the tower's own name for it.
        immich: pad_token_id, ends_in_pad and width of towers with an open_clip model's inputs; see `PaddedTextTower`.
    """
    shape = input_shape(model.vision_model) if shape is None else shape
    images = torch.linspace(-1, 1, IMAGES).view(-1, *[1] * len(shape)).expand(-1, *shape).clone()
    padding, vocabulary = model.config.text_padding, model.text_model.config.vocab_size
    length = padding["length"] if padding else LENGTH
    ids = torch.arange(2, 2 + TEXTS * length).view(TEXTS, length) % vocabulary
    many = {0: Dim("images")}
    some: dict[int, Any] = {0: Dim("texts")} if padding else {0: Dim("texts"), 1: Dim("length", min=2)}
    if immich:
        text = PaddedTextTower(model, *immich)
        return {
            "vision_model": Graph(ImageTower(model, immich[-1]), {"image": images}, (many,), ["image_embeds"]),
            "text_model": Graph(text, {"text": ids.int()}, (some,), ["text_embeds"]),
        }
    pixels = {input_name(model.vision_model): images}
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    graphs = {
        "vision_model": Graph(ImageTower(model), pixels, (many,), ["image_embeds"]),
        "text_model": Graph(TextTower(model), texts, (some, some), ["text_embeds"]),
    }
    if weights:
        blocks = list(ImageSide(model)(images))
        names = [f"keys_values_{number}" for number in range(len(blocks))]
        graphs["reranker_images"] = Graph(ImageSide(model), pixels, (many,), names)
        axes = (some, some, [many] * len(blocks))
        graphs["reranker"] = Graph(Head(model, weights), {**texts, "keys_values": blocks}, axes, ["added"])
    return graphs


def named_inputs(graph: Graph) -> dict[str, Tensor]:
    """Return the inputs with a name for each tensor of a list."""
    found = dict(graph.inputs)
    blocks = found.pop("keys_values", [])
    return found | {f"keys_values_{number}": block for number, block in enumerate(blocks)}


def trace(graph: Graph, path: Path) -> None:
    """Write a graph as ONNX.

    Raises:
        RunError: if torch cannot export it, with torch's reason.
    """
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                graph.module.eval(),
                tuple(graph.inputs.values()),
                dynamo=True,
                dynamic_shapes=graph.axes,
                input_names=list(named_inputs(graph)),
                output_names=graph.outputs,
                opset_version=OPSET,
                verbose=False,
            )
            assert program is not None
            for node in program.model.graph.all_nodes():
                node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)  # paths and code of this machine
            program.save(path, external_data=False)
    except Exception as error:  # of any kind: tracing runs the code of any backbone
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError):  # a full disk
            raise cause from None
        raise RunError(
            f"{path.name} cannot be made; torch's exporter stops: {one_line(cause)}. Try another version of torch, or export a "
            "model with other backbones."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what packages say of their own insides."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def write_int8(source: Path, target: Path) -> None:
    """Write a graph with int8 weights, by onnxruntime's dynamic quantisation.

    Weights have 7 of the 8 bits: x86 processors without VNNI add two products in 16 bits, which overflow otherwise (a difference from
    torch of 0.22 in place of 0.009). Convolutions stay in fp32, and products that narrow, the second of each MLP: docs/export.md has
    the figures.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    shapes = {weight.name: weight.dims for weight in model.graph.initializer}
    products = [(node.name, shapes.get(node.input[1])) for node in model.graph.node if node.op_type == "MatMul"]
    narrowing = [name for name, shape in products if shape is not None and shape[0] > shape[1]]
    kinds = ["MatMul", "Gemm", "Gather"]
    how = {"per_channel": True, "weight_type": QuantType.QInt8, "reduce_range": True, "nodes_to_exclude": narrowing}
    with _quiet():
        quantize_dynamic(model, target, kinds, **how)  # type: ignore[arg-type]


@torch.no_grad()
def differences(graphs: Mapping[str, Graph], paths: Mapping[str, Path]) -> dict[str, float]:
    """Return the largest absolute difference of each exported graph from torch, on drawn inputs of other sizes than traced."""
    import onnxruntime

    found, draw = {}, torch.Generator().manual_seed(0)
    for part, graph in graphs.items():
        inputs = {}
        for name, value in named_inputs(graph).items():
            more = value.repeat(2, *[1] * (value.dim() - 1))
            inputs[name] = torch.randn(more.shape, generator=draw) if value.is_floating_point() else more
        if "attention_mask" in inputs:
            inputs["attention_mask"][-1, LENGTH // 2 :] = 0
        blocks = [inputs[name] for name in inputs if name.startswith("keys_values_")]
        right = graph.module(*(blocks if name == "keys_values" else inputs[name] for name in graph.inputs))
        session = onnxruntime.InferenceSession(paths[part], providers=["CPUExecutionProvider"])
        given = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
        pairs = zip(session.run(None, given), right if isinstance(right, tuple) else (right,), strict=True)
        apart = [
            ((torch.from_numpy(one) - other).abs().max() / max(1.0, other.abs().max())).item() for one, other in pairs
        ]
        found[part] = max(apart)
    return found
