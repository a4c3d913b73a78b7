"""Write a graph in 16-bit floats or with 8-bit weights, by onnxruntime's own tools.

int8 is dynamic quantisation: weights of matrix products and embeddings are int8, one scale per column; their inputs are rounded to
uint8 with the scale of the moment. Convolutions stay in fp32, for two measured reasons (MobileNetV2, docs/export.md): rounded
like this, R@1 falls from 0.31 to 0.10, because one scale for all channels of a depthwise convolution's input leaves most channels
few values; and with 8-bit weights alone, nothing is lost, but a run takes twice the time, because they are unpacked every time.
"""

import shutil
from pathlib import Path

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
            quantize_dynamic(
                source, target, op_types_to_quantize=QUANTISED, per_channel=True, weight_type=QuantType.QInt8
            )
