"""Write `docs/code.md` from the packages' docstrings and the floors of `tests/test_layout.py`: `make map`."""

import ast
from pathlib import Path

from tests.kit import house

PAGE = house.ROOT / "docs/code.md"
HEAD = """# The code

*Written by `make map` from the packages' docstrings and `tests/kit/house.py`; a test compares.*

A module imports from its own folder and from the floors below. The core never imports an extra: `mm_utils/doors.py` finds
what the extras add, by name. [decisions.md](decisions.md) has the reasons, [CONTRIBUTING.md](../CONTRIBUTING.md) the rules.
"""
READING = {
    "Follow a batch": (
        "From the flags to the step. `make road` traces which files and lines one default step enters.",
        [
            "scripts/pretrain.py",
            "mm_utils/data/training_data.py",
            "mm_utils/data/pairs.py",
            "mm_utils/data/batches/tokens.py",
            "mm_utils/data/batches/order.py",
            "mm_utils/data/media/medium.py",
            "mm_utils/data/batches/dataset.py",
            "mm_utils/data/batches/loaders.py",
            "mm_utils/training/trainer.py",
            "mm_utils/training/step.py",
            "mm_utils/objectives/grad_cache.py",
            "mm_utils/objectives/joint.py",
            "mm_utils/objectives/terms.py",
            "mm_utils/objectives/contrastive.py",
            "mm_utils/objectives/losses.py",
            "mm_utils/distributed.py",
            "mm_utils/model/modeling_fusion_dual_encoder.py",
        ],
    ),
    "Follow a checkpoint": (
        "From the step that saves to the run that goes on.",
        [
            "mm_utils/training/trainer.py",
            "mm_utils/checkpointing/state.py",
            "mm_utils/checkpointing/writer.py",
            "mm_utils/checkpointing/files.py",
            "mm_utils/files.py",
            "mm_utils/run/output_folder.py",
            "mm_utils/run/checks.py",
            "mm_utils/run/start.py",
            "mm_utils/data/training_data.py",
            "scripts/verify_checkpoints.py",
        ],
    ),
}


def sentence(path: Path) -> str:
    """First line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def rough(lines: int) -> str:
    """Lines to the nearest hundred, so that the page does not change with every commit."""
    return f"{max(round(lines, -2), 100):,}"


def page() -> str:
    """Return the whole page."""
    totals = house.totals()
    rows = [
        HEAD,
        "## Rooms of the core",
        "",
        "From the lowest floor up.",
        "",
        "| room | lines | what it does |",
        "|---|--:|---|",
    ]
    top = ", ".join(sorted(f"`{path.stem}`" for path in house.PACKAGE.glob("*.py") if path.stem != "__init__"))
    rows.append(f"| `mm_utils/*.py` | {rough(totals['top'])} | {top} |")
    for floor in house.FLOORS:
        for room in sorted(floor - {"extras"}):
            folder = house.PACKAGE / room
            for each in sorted([folder, *(path.parent for path in folder.glob("*/__init__.py"))]):
                if (each / "__init__.py").is_file():
                    name = each.relative_to(house.ROOT).as_posix()
                    lines = sum(house.lines(path) for path in each.glob("*.py"))
                    rows.append(f"| `{name}` | {rough(lines)} | {sentence(each / '__init__.py')} |")
    rows += [
        "",
        "## Extras",
        "",
        "What an extra adds to a run stands in its `door.py`; those without one are called by scripts of their own or are still imported.",
        "",
        "| extra | lines | what it does |",
        "|---|--:|---|",
    ]
    for path in sorted((house.PACKAGE / "extras").glob("*/__init__.py")):
        lines = sum(house.lines(each) for each in path.parent.glob("*.py"))
        rows.append(f"| `{path.parent.name}` | {rough(lines)} | {sentence(path)} |")
    rows += ["", "## Totals", "", "| what | lines | at most |", "|---|--:|--:|"]
    rows += [f"| {name} | {rough(totals[name])} | {most:,} |" for name, most in house.BUDGETS.items()]
    rows += ["", "## Reading lists"]
    for title, (first, files) in READING.items():
        rows += ["", f"### {title}", "", first, ""]
        rows += [f"{number}. `{name}`: {sentence(house.ROOT / name)}" for number, name in enumerate(files, 1)]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
