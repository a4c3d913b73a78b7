"""A tiny model with a head that counts, and its export, made once."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor
from scripts import export

WORDS = ["a red circle, number 3", "one square in yellow", "green and blue", "number 2: one circle in red"]
WEIGHTS = {"match": 0.7, "caption": 0.4}


def save_tiny(folder: Path) -> Path:
    """Write a model with weights that matter: fresh ones are so small that rounding would not show."""
    tower = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "hidden_size": 32}
    configs = {
        "vision": {"model_type": "convnext", "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2,
                   "patch_size": 4, "image_size": 32, "layer_scale_init_value": 1.0, "initializer_range": 0.1},
        "text": {"model_type": "bert", **tower, "initializer_range": 0.2},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    files = {f"{name}_config": str(folder / f"{name}.json") for name in configs}
    args = ModelArguments(**files, fusion_layers=2, projection_dim=20)
    processor = load_processor(args, WORDS * 20)
    torch.manual_seed(0)
    model = build_model(args, processor.tokenizer)
    model.add_token_head(captions=True)
    assert model.fusion is not None
    torch.nn.init.normal_(model.fusion.match.weight)
    model.config.rerank_weights = WEIGHTS
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A folder and what `make(folder)` returns, made by one of the processes of a session for all."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    returned = folder.with_suffix(".pickle")
    with FileLock(folder.with_suffix(".lock")):
        if not returned.exists():
            returned.write_bytes(pickle.dumps(make(folder)))
    return folder, pickle.loads(returned.read_bytes())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    return once(tmp_path_factory, "model", save_tiny)[0]


@pytest.fixture(scope="session")
def model(folder: Path) -> FusionDualEncoderModel:
    return FusionDualEncoderModel.from_pretrained(folder).eval()


@pytest.fixture(scope="session")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, float]]]:
    """The folder of an export in both precisions, and its differences from torch."""

    def make(output: Path) -> dict[str, dict[str, float]]:
        flags = ["--model_name_or_path", str(folder), "--output_dir", str(output)]
        return export.main([*flags, "--precision", "fp32,int8"])

    return once(tmp_path_factory, "exported", make)
