"""A program that takes the place of a training run, and the grids of its flags."""

from pathlib import Path

# Takes the place of `python`: it is given the script and its flags, and leaves what a finished run leaves.
STAND_IN = """
import json, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file

flags = dict(word.removeprefix("--set=").split("=") for word in sys.argv[2:] if "=" in word)
folder, seed = Path(flags["output_dir"]), int(flags["seed"])
with open(folder.parent / "started.txt", "a") as file:
    file.write(folder.name + "\\n")
if flags.get("fails"):
    print("first\\nno memory")
    raise SystemExit(3)
recall = float(flags.get("recall", 0.5)) + 0.01 * seed
rows = [{"step": 1, "matching_lift": 0.1}, {"step": 2, "matching_lift": 0.2}, {"step": 2, "eval_recall@1": recall}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
save_file({"a": np.zeros((2, 3)), "b": np.zeros(4), "scale": np.zeros(())}, folder / "model.safetensors")
"""


def started(folder: Path) -> list[str]:
    return (folder / "started.txt").read_text().split()


def write_grid(folder: Path, text: str) -> str:
    path = folder / "grid.yaml"
    path.write_text(text)
    return str(path)
