"""Write a graph in 16-bit floats or with 8-bit weights, by onnxruntime's own tools.

int8 is dynamic quantisation: weights of matrix products and embeddings are int8, one scale per column; the inputs of products are
rounded to uint8 with the scale of the moment, which is one for the whole batch. Weights have 7 of the 8 bits: x86 processors without
VNNI add two products in 16 bits, which overflow otherwise (a difference from torch of 0.22 in place of 0.009). Two kinds of weights stay in fp32, for reasons that
were measured (docs/export.md):

    convolutions        R@1 of a MobileNetV2 falls from 0.31 to 0.10: a depthwise convolution's input gets one scale for all
                        channels, and most of them few values. Weights alone in 8 bits lose nothing, but are unpacked in every run,
                        which then takes twice the time.
    narrowing products  the second of each MLP, with more rows than columns: behind the activation function, a few inputs are
                        far larger than all others. In int8, they make half of the whole error.
"""

import shutil
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from mm_utils.export.graphs import quiet

QUANTISED = ["MatMul", "Gemm", "Gather"]


def convert(source: Path, target: Path, precision: str) -> None:
    """Write the fp32 graph `source` as `target` in a precision; inputs and outputs stay fp32."""
    with quiet():
        if precision == "fp32":
            shutil.copy(source, target)
        elif precision == "fp16":
            onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
        else:
            model = onnx.load(source)
            options: dict[str, Any] = {
                "per_channel": True,
                "weight_type": QuantType.QInt8,
                "reduce_range": True,
                "nodes_to_exclude": _narrowing(model),
            }
            quantize_dynamic(model, target, op_types_to_quantize=QUANTISED, **options)


def _narrowing(model: onnx.ModelProto) -> list[str]:
    """Return the names of products with a weight that has more rows than columns."""
    shapes = {weight.name: weight.dims for weight in model.graph.initializer}
    products = [(node.name, shapes.get(node.input[1])) for node in model.graph.node if node.op_type == "MatMul"]
    return [name for name, shape in products if shape is not None and shape[0] > shape[1]]
