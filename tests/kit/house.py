"""Floors of the package and totals of lines: what `tests/test_layout.py` holds and `docs/code.md` shows."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mm_utils"
FLOORS = [
    {
        "command",
        "communication",
        "copies",
        "distributed",
        "doors",
        "files",
        "stored",
        "text",
    },
    {"arguments"},
    {"data", "model"},
    {"objectives", "reliability"},
    {"checkpointing"},
    {"reports"},
    {"evaluation"},
    {"training"},
    {"run"},
    {"extras"},
]
"""A module imports from its own folder and from lower floors; folders of one floor do not import each other."""
DATA_FLOORS = [
    {"faults", "images"},
    {"media", "parquet"},
    {"paths"},
    {"scenes"},
    {"rows"},
    {"prepare"},
    {"pairs"},
    {"batches"},
    {"training_data"},
]
BUDGETS = {
    "core": 24_000,
    "data": 9_000,
    "model": 3_750,
    "objectives": 1_850,
    "training": 1_900,
    "checkpointing": 900,
    "reliability": 900,
    "evaluation": 1_400,
    "reports": 750,
    "run": 1_820,
    "extras": 21_300,
    "tests": 50_860,
}
"""Lines at most, blank ones and docstrings included. What raises one says why in docs/decisions.md."""


def lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def totals() -> dict[str, int]:
    """Lines of every room, of the core, of the extras and of the tests; `top` are the modules in no room."""
    found = {
        folder.name: sum(map(lines, folder.rglob("*.py"))) for folder in PACKAGE.iterdir() if any(folder.glob("*.py"))
    }
    found["top"] = sum(map(lines, PACKAGE.glob("*.py")))
    found["core"] = sum(count for name, count in found.items() if name != "extras")
    found["tests"] = sum(map(lines, (ROOT / "tests").rglob("*.py")))
    return found


ROAD = {
    "step": (18, 1_020),
    "run": (75, 7_900),
}  # files and lines of functions that a default run enters (`make road`)
SEARCH_MODULES = 39
