"""The preparing benchmark on a few images: both contestants do the work that is compared."""

import json
from pathlib import Path

from PIL import Image

from benchmarks.data.preparing import draw_photographs, main, pillow, tandem
from mm_utils.data.prepare.ingest import read_part


def test_figures_of_both_are_written(tmp_path: Path) -> None:
    medians = main(["--most", "4", "--rounds", "1", "--output_file", str(tmp_path / "figures.json")])
    assert medians.keys() == {"pillow", "tandem"}
    assert min(medians.values()) > 0
    assert json.loads((tmp_path / "figures.json").read_text())["milliseconds"] == medians


def test_both_make_images_of_one_size(tmp_path: Path) -> None:
    draw_photographs(tmp_path, 2)
    paths = sorted(tmp_path.glob("*.jpg"))
    for contestant in (pillow, tandem):
        (tmp_path / contestant.__name__).mkdir()
        contestant(paths, tmp_path / contestant.__name__, 100)
    sizes = [Image.open(path).size for path in sorted((tmp_path / "pillow").iterdir())]
    rows = read_part(tmp_path / "tandem" / "part-000000.arrow", ["width", "height"]).to_pylist()
    assert sizes == [(row["width"], row["height"]) for row in rows] == [(133, 100)] * 2
