"""Trace the towers of a model to ONNX, with torch's own exporter, and compare them with torch.

Every graph takes any number of images or texts, and texts of any length; a text tower that reads padding (SigLIP's) takes texts
of its one length.

"Images" in names are the media of the model: of clips `[K, T, 3, S, S]`, of sounds what the feature extractor makes of samples.

Shape letters: K images, T texts, L tokens, E embedding width.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import pad

from mm_utils.distributed import RunError
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, input_name, input_shape
from mm_utils.text import one_line

OPSET = 18  # of ONNX's operators: the least that torch writes; onnxruntime reads it since 1.14 (February 2023)
MOST_DIFFERENCE = 1e-5  # of an fp32 embedding
# The sizes of the traced inputs; none is 1, which the exporter would take for a constant.
IMAGES = 3
TEXTS = 2
LENGTH = 7


class Graph(NamedTuple):
    """A part of a model and how it is traced."""

    module: nn.Module
    inputs: dict[str, Tensor]
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
        self.pad_token_id = pad_token_id
        self.ends_in_pad = ends_in_pad
        self.zeros = width - model.config.projection_dim

    def forward(self, text: Tensor) -> Tensor:
        """Embed texts."""
        is_pad = text == self.pad_token_id
        mask = (~is_pad).long()
        if self.ends_in_pad:
            # up to the first of them, which is the text's own end
            mask = ((is_pad.long().cumsum(1) - is_pad.long()) == 0).long()
        return pad(self.model.encode_text(text.long(), mask, with_states=False)[0], (0, self.zeros))


@torch.no_grad()
def graphs_of(
    model: FusionDualEncoderModel, shape: Sequence[int] | None = None, immich: tuple[int, bool, int] | None = None
) -> dict[str, Graph]:
    """Return the graphs of the two towers, with the input and output names of CLIP in ONNX.

    Args:
        model: the model.
        shape: of a clip or a sound, as its tower takes it; None for images. The input has the tower's own name for it.
        immich: pad_token_id, ends_in_pad and width of towers with an open_clip model's inputs; see `PaddedTextTower`.
    """
    shape = input_shape(model.vision_model) if shape is None else shape
    # Images of one value each: tracing asks for shapes alone
    images = torch.linspace(-1, 1, IMAGES).view(-1, *[1] * len(shape)).expand(-1, *shape).clone()
    padding = model.config.text_padding
    vocabulary = model.text_model.config.vocab_size
    length = padding["length"] if padding else LENGTH
    ids = torch.arange(2, 2 + TEXTS * length).view(TEXTS, length) % vocabulary
    many = {0: Dim("images")}
    some: dict[int, Any] = {0: Dim("texts")} if padding else {0: Dim("texts"), 1: Dim("length", min=2)}
    if immich:
        vision = Graph(ImageTower(model, immich[-1]), {"image": images}, (many,), ["image_embeds"])
        text = Graph(PaddedTextTower(model, *immich), {"text": ids.int()}, (some,), ["text_embeds"])
    else:
        vision = Graph(ImageTower(model), {input_name(model.vision_model): images}, (many,), ["image_embeds"])
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        text = Graph(TextTower(model), texts, (some, some), ["text_embeds"])
    return {"vision_model": vision, "text_model": text}


def trace(graph: Graph, path: Path) -> None:
    """Write a graph as ONNX.

    Raises:
        RunError: if torch cannot export it, with torch's reason.
    """
    logging.disable(logging.WARNING)  # packages say much of their own insides
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph.module.eval(),
                tuple(graph.inputs.values()),
                dynamo=True,
                dynamic_shapes=graph.axes,
                input_names=list(graph.inputs),
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
    finally:
        logging.disable(logging.NOTSET)


def write_int8(path: Path, stem: str) -> Path:
    """Give a graph int8 weights, by onnxruntime's dynamic quantisation, and another name, which is returned.

    Weights have 7 of the 8 bits: x86 processors without VNNI add two products in 16 bits, which overflow otherwise (a difference from
    torch of 0.22 in place of 0.009). Convolutions stay in fp32, and products that narrow, the second of each MLP: docs/export.md has
    the figures.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    shapes = {weight.name: weight.dims for weight in model.graph.initializer}
    products = [(node.name, shapes.get(node.input[1])) for node in model.graph.node if node.op_type == "MatMul"]
    # [3072, 768], the second of a ViT-B's MLP
    narrowing = [name for name, shape in products if shape is not None and shape[0] > shape[1]]
    how = {"per_channel": True, "weight_type": QuantType.QInt8, "reduce_range": True, "nodes_to_exclude": narrowing}
    quantize_dynamic(model, path, ["MatMul", "Gemm", "Gather"], **how)  # type: ignore[arg-type]
    return path.rename(path.with_stem(stem))


@torch.no_grad()
def differences(graphs: Mapping[str, Graph], paths: Mapping[str, Path]) -> dict[str, float]:
    """Return the largest absolute difference of each exported graph from torch, on drawn inputs of other sizes than traced."""
    import onnxruntime

    found = {}
    draw = torch.Generator().manual_seed(0)
    for part, graph in graphs.items():
        inputs = {}
        for name, value in graph.inputs.items():
            more = value.repeat(2, *[1] * (value.dim() - 1))  # 6 images, 4 texts
            inputs[name] = torch.randn(more.shape, generator=draw) if value.is_floating_point() else more
        if "attention_mask" in inputs:
            inputs["attention_mask"][-1, LENGTH // 2 :] = 0
        right = graph.module(*inputs.values())
        session = onnxruntime.InferenceSession(paths[part], providers=["CPUExecutionProvider"])
        [embeds] = session.run(None, {each.name: inputs[each.name].numpy() for each in session.get_inputs()})
        found[part] = (torch.from_numpy(embeds) - right).abs().max().item()
    return found
