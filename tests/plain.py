"""Refuse what does several things in one statement: `python -m tests.plain`, over the package, the scripts and the tests that are free of it, or over given folders."""

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

TESTED = (
    "checkpointing",
    "evaluation",
    "export",
    "finetuning",
    "launch",
    "model",
    "objectives",
    "reliability",
    "run",
    "training",
)
FOLDERS = ["mm_utils", "scripts", *(f"tests/{room}" for room in TESTED)]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def fault(node: Any) -> str | None:
    """Return what a node does that should be several statements, or None."""
    if isinstance(node, ast.Call):
        splatted = [part.value for part in node.args if isinstance(part, ast.Starred)]
        if any(isinstance(value, ast.Tuple | ast.List) for value in splatted):
            return "a literal is splatted into a call"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        if isinstance(node.value, ast.GeneratorExp):
            return "a generator is unpacked into names"
        names = {ast.unparse(part) for part in node.targets[0].elts}
        if isinstance(node.value, ast.Tuple) and names != {ast.unparse(part) for part in node.value.elts}:
            return "a tuple is assigned to a tuple that it does not swap"
    if isinstance(node, COMPREHENSIONS) and sum(isinstance(part, COMPREHENSIONS) for part in ast.walk(node)) > 1:
        return "a comprehension stands in a comprehension"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    faults = 0
    for folder in parser.parse_args(argv).folders:
        for path in sorted(Path(folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_bytes()))
            for node in nodes:
                if what := fault(node):
                    faults += 1
                    print(f"{path}:{node.lineno}: {what}. Write one statement for each.")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
