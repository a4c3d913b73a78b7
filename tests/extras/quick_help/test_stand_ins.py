"""`--help` prints with stand-ins what it prints with the libraries, and a script that they do not serve gets the libraries."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.commands import ROOT

SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
# One process for all: each script is run in a fork of a Python that has imported nothing.
RUN = """
import importlib.util, os, runpy, sys
for script in sys.argv[2:]:
    if os.fork() == 0:
        sys.argv = [script, sys.argv[1]]
        sys.stdout = open(os.path.basename(script) + ".txt", "w")
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            sys.stdout.close()
            open(os.path.basename(script) + ".loaded", "w").write(repr(getattr(sys.modules.get("torch"), "__version__", "")))
    if os.wait()[1]:
        sys.exit(f"{script} failed")
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("help")
    words = [sys.executable, "-c", RUN, "--help-all", *map(str, SCRIPTS)]
    subprocess.run(
        words, cwd=folder, env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}, check=True, timeout=300
    )
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_help_is_that_of_the_libraries(
    script: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [str(script), "--help-all"])
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module(f"scripts.{script.stem}").main(["--help-all"])
    assert (quick / f"{script.name}.txt").read_text() == capsys.readouterr().out
    assert (quick / f"{script.name}.loaded").read_text() == "''"


def test_a_script_that_computes_with_a_library_loads_it(tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_text("import torch, json.tool\nWIDTH = 2 * torch.zeros(3).numel()\n")
    code = (
        "import sys; from mm_utils.extras.quick_help import stand_ins; sys.argv[1:] = ['--help']; stand_ins._answer();"
        "from importlib.util import find_spec; sys.exit(not find_spec('torch').origin or 'json.tool' in sys.modules)"
    )
    words = [sys.executable, "-c", f"import sys; sys.argv[0] = {str(tmp_path / 'changed.py')!r}; {code}"]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=100)
