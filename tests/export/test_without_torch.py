"""The one file that travels with an export returns the model's numbers where torch cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from tests.kit.fault_images import TEXTS as AWKWARD
from tests.kit.fault_images import awkward_pictures

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("torch", "torchvision", "transformers", "mm_utils", "datasets", "accelerate"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""
PROGRAM = """
import json, sys
from PIL import Image
from without_torch import Towers
paths, texts = json.loads(sys.argv[1])
for name in ("torch", "transformers", "mm_utils"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} was imported")
towers = Towers(".")
one = towers.images([paths[0]])
for images in (paths[0], Image.open(paths[0]), (paths[0],)):
    assert (towers.images(images) == one).all()
assert (towers.texts(texts[0]) == towers.texts(texts[:1])).all()
assert towers.images([]).shape == towers.texts([]).shape == (0, 20)
assert towers.rank(texts[0], []).shape == (0,)
ranks = [towers.rank(text, paths).tolist() for text in texts]
print(json.dumps([towers.images(paths).tolist(), towers.texts(texts).tolist(), ranks]))
print(Towers(".", "int8").rank(texts[0], paths).shape == (len(paths),))
"""
TEXTS = ["a red circle, number 3", "one square", "number 2: one circle in red " * 3, *AWKWARD]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, files = tmp_path_factory.mktemp("pictures"), []
    for number, content in enumerate(awkward_pictures().values()):
        files.append(folder / f"{number}.png")
        files[-1].write_bytes(content)
    return list(map(str, files))


def run(folder: Path, place: Path, *words: str) -> str:
    (place / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    ran = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_images_texts_and_the_head_as_in_torch(
    exported: tuple[Path, dict], model: FusionDualEncoderModel, paths: list[str], tmp_path: Path
) -> None:
    figures, is_int8 = run(exported[0], tmp_path, "-c", PROGRAM, json.dumps([paths, TEXTS])).splitlines()
    images, texts, ranks = json.loads(figures)
    assert is_int8 == "True"
    expected = model.encode(images=paths, texts=TEXTS)
    np.testing.assert_allclose(images, expected[0], atol=1e-2)  # Pillow's bicubic filter is not torch's to the bit
    np.testing.assert_allclose(texts, expected[1], atol=1e-5)
    for text, scores in zip(TEXTS, ranks, strict=True):
        np.testing.assert_allclose(scores, [score for _, score in sorted(model.rerank(text, paths))], 1e-3, 2e-2)
    assert np.abs(np.array(ranks).T - (expected[0] @ expected[1].T).numpy()).max() > 0.01  # the head says something


def test_the_command_prints_the_best_first(
    exported: tuple[Path, dict], model: FusionDualEncoderModel, paths: list[str], tmp_path: Path
) -> None:
    lines = run(exported[0], tmp_path, "without_torch.py", TEXTS[0], *paths).splitlines()
    scores = {line.split()[1]: float(line.split()[0]) for line in lines}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    expected = {paths[place]: score for place, score in model.rerank(TEXTS[0], paths)}
    assert scores == pytest.approx(expected, rel=1e-3, abs=2e-2)
