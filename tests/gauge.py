"""Count the tokens of each folder: `python -m tests.gauge`. Comments, docstrings and layout are free, so nothing is won by folding lines."""

import ast
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

FREE = {getattr(tokenize, kind) for kind in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def tokens(path: Path) -> int:
    """Return the number of tokens of a Python file."""
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, DOCUMENTED)]
    docstrings = sum(ast.get_docstring(node) is not None for node in nodes)
    with open(path, "rb") as file:
        return sum(token.type not in FREE for token in tokenize.tokenize(file.readline)) - docstrings


if __name__ == "__main__":
    rooms: Counter[str] = Counter()
    for name in subprocess.check_output(["git", "ls-files", "*.py"], text=True).split():
        path = Path(name)
        rooms[path.parts[0]] += tokens(path)
        if path.parts[0] == "mm_utils":
            rooms["/".join(path.parts[:2])] += tokens(path)
    for room, count in sorted(rooms.items()):
        print(f"{count:9,}  {room}")
