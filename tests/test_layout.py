"""Imports go down, and the modelling files that travel with every model need nothing of ours."""

import ast
import sys
from graphlib import TopologicalSorter

from tests.kit.processes import ROOT

TRAVELLING = ("mm_utils.model.modeling_fusion_dual_encoder", "mm_utils.model.fusion", "mm_utils.model.reading")


def imports() -> dict[str, set[str]]:
    """Return the dotted names that every module of the package and every script imports, anywhere in it."""
    names = {}
    for path in [*(ROOT / "mm_utils").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names[module] = taken = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                taken |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                package = f"{module.rpartition('.')[0]}.{node.module}" if node.level else node.module
                taken |= {f"{package}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_down() -> None:
    """No module imports itself by way of others, no room of the package another that imports it, and nobody scripts or tests."""
    names = imports()
    modules = {
        module: {name if name in names else name.rpartition(".")[0] for name in taken} & names.keys() - {module}
        for module, taken in names.items()
    }
    list(TopologicalSorter(modules).static_order())  # CycleError names a circle
    rooms = {}
    for module, others in modules.items():
        if module.count(".") > 1:
            below = {other.split(".")[1] for other in others - set(TRAVELLING) if other.count(".") > 1}
            rooms.setdefault(module.split(".")[1], set()).update(below - {module.split(".")[1]})
    list(TopologicalSorter(rooms).static_order())
    assert not [
        name for taken in names.values() for name in taken if name.startswith(("scripts.", "tests.", "benchmarks."))
    ]


def test_the_modelling_file_travels_alone() -> None:
    names = imports()
    taken = set().union(*(names[module] for module in TRAVELLING))
    packages = {name.split(".")[0] for name in taken} - set(sys.stdlib_module_names)
    of_some_files = {"av", "pillow_heif", "scipy", "simplejpeg"}  # asked for where such a file is opened
    assert packages - of_some_files == {"PIL", "mm_utils", "numpy", "torch", "transformers"}
    assert {name.rpartition(".")[0] for name in taken if name.startswith("mm_utils")} == set(TRAVELLING[1:])
