"""Runs of scripts in processes of their own, and what they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

ROUNDED = 5e-5  # a key's bias has no gradient but rounding, of which Adam makes whole steps
ROOT = Path(__file__).parents[2]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return logged(folder, "loss")


def logged(folder: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows_of(folder) if name in row}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return FusionDualEncoderModel.from_pretrained(folder).state_dict()


def launch(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    return subprocess.run(
        [*accelerate, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
