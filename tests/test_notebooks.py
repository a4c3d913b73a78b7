"""The notebook runs from a clone, and is committed without outputs."""

import sys
from pathlib import Path

import nbformat
import pytest

from mm_utils.training.arguments import FinetuningArguments

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/quickstart.ipynb"
TINY = {"QUICKSTART_STEPS": "2", "QUICKSTART_PICTURES": "96"}


def cells() -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]


def test_it_is_valid_has_no_outputs_and_links_that_lead_somewhere() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells())
    links = [part.partition(")")[0] for cell in notebook.cells for part in cell.source.split("](")[1:]]
    assert links
    assert all((NOTEBOOK.parent / link).is_file() for link in links)


def test_its_cells_run(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with the least data: what it imports and calls exists, and prints five hits."""
    for name, value in {**TINY, "QUICKSTART_FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    names: dict[str, object] = {}
    for cell in cells():
        exec(compile(cell.source, str(NOTEBOOK), "exec"), names)
    assert len(names["reranked"]) == len(names["similar"]) == 5  # type: ignore[arg-type]
    assert Path.cwd() == ROOT


def test_a_run_in_a_notebook_is_resumed_by_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    args = FinetuningArguments(output_dir="outputs/mine")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["/usr/lib/ipykernel_launcher.py", "-f", "/home/me/kernel-1.json"])
    expected = "scripts/finetune.py --config outputs/mine/config.yaml --resume_from_checkpoint latest"
    assert args.resume_command == f"python {expected}"
    monkeypatch.setattr("sys.argv", ["elsewhere/own.py", "--seed", "7"])
    assert args.resume_command.startswith("python elsewhere/own.py --config outputs/mine/config.yaml")
