"""Read YAML that anyone may have written: plain values with the lines that they stand in, and mistakes in one line.

Tags that make objects, aliases (nine of them may stand for gigabytes) and keys that occur twice are refused.
"""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

_LARGEST = 1 << 20  # bytes; a file of flags has about a kilobyte


class Entry(NamedTuple):
    """A value and the number of the line that its key stands in."""

    value: Any
    line: int


class _Loader(yaml.SafeLoader):
    """Without aliases and keys that occur twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "an alias; write the value out", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            earlier = seen.setdefault(str(key.value), line)
            if earlier != line:
                problem = f"the key '{key.value}' again, after line {earlier}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


def read_flat_yaml(path: str) -> dict[str, Entry]:
    """The entries of a YAML file that holds one mapping, or nothing.

    Raises:
        ValueError: of one line that names the file, and the line where there is one.
    """
    if not Path(path).is_file():
        raise ValueError(f"--config is {path}; there is no such file")
    if Path(path).stat().st_size > _LARGEST:
        raise ValueError(f"--config is {path}; it has more than {_LARGEST:,} bytes. Give flat 'flag: value' lines")
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}{_place(error)} is not valid YAML: {_problem(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start + 1}). Save it as UTF-8") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply; give flat 'flag: value' lines") from error
    if node is None or values is None:
        return {}
    if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; give flat 'flag: value' lines")
    lines = [key.start_mark.line + 1 for key, _ in node.value]
    return {str(key): Entry(value, line) for (key, value), line in zip(values.items(), lines, strict=True)}


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1},"


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or " ".join(str(error).split()))
