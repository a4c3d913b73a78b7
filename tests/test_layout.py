"""The house: one import direction, and totals of lines."""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.kit.house import BUDGETS, DATA_FLOORS, FLOORS, PACKAGE, ROOT, SEARCH_MODULES, lines, totals

SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
DATA_FLOOR_OF = {name: floor for floor, names in enumerate(DATA_FLOORS) for name in names}
METRICS = {"retrieval_recall", "classification_scores"}  # folders of `evaluate.load`, which import nothing of ours
MODELLING = PACKAGE / "model/modeling_fusion_dual_encoder.py"  # travels with every model, and so does `READING`
READING = PACKAGE / "model/reading.py"
STANDS_ON = {
    "benchmarks": "formats",
    "classes": "formats lora tars",
    "data_reports": "languages streams",
    "dry_run": "several_media",
    "export": "families",
    "launch": "data_reports",
    "measured": "flops",
    "placement": "micro_batch",
    "search": "measured tars",
    "streams": "tars",
    "tars": "formats",
}
"""Which extras an extra imports; all others can be deleted alone."""
MAX_ARGUMENTS, MAX_FUNCTION = 8, 80
MAX_CHAIN = 19


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name without `mm_utils.`."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name not in METRICS]
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in files
    }


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it, `from package import module` as `package.module`."""
    return names_of(nodes(path), path)


def names_of(statements: Iterable[ast.AST], path: Path) -> set[str]:
    """What import statements import."""
    found = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or path == MODELLING, f"{path} imports relatively; write mm_utils. in full"
            module = f"mm_utils.model.{node.module}" if node.level else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


@cache
def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, by their name in `modules`."""
    return ours(imports(path))


def ours(imported: set[str]) -> set[str]:
    known = modules()
    names = {name.removeprefix("mm_utils.") for name in imported if name.startswith("mm_utils.")}
    return {name if name in known else name.rpartition(".")[0] for name in names} & known.keys()


def loaded_by(path: Path, found: set[str]) -> set[str]:
    """Add the modules of the package that importing a file loads: what functions import is not among them."""
    for name in ours(names_of(tree(path).body, path)):
        parts = name.split(".")
        for module in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & modules().keys() - found:
            found.add(module)
            loaded_by(modules()[module], found)
    return found


def test_every_module_has_a_floor() -> None:
    assert {name.split(".")[0] for name in modules() if name != "__init__"} == set(FLOOR_OF)


def test_imports_go_down() -> None:
    wrong = []
    for name, path in modules().items():
        for other in own_imports(path):
            here, there = name.split(".")[0], other.split(".")[0]
            if other == "model.reading":
                continue  # `model.reading` imports nothing of ours
            if here != there and FLOOR_OF[there] >= FLOOR_OF[here] and FLOOR_OF[here]:
                wrong.append(f"{name} imports {other}")
            elif here == there == "data" and name.count(".") and other.count("."):
                here, there = name.split(".")[1], other.split(".")[1]
                if here != there and DATA_FLOOR_OF[there] >= DATA_FLOOR_OF[here]:
                    wrong.append(f"{name} imports {other}")
    assert not wrong


def test_extras_import_few_others() -> None:
    """What is deleted with an extra: its tests, and the extras that stand on it."""
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        others = {other.split(".")[1] for other in own_imports(path) if other.startswith("extras.")}
        if others:
            assert name.startswith("extras."), f"{name} of the core imports the extras {others}"
            found.setdefault(name.split(".")[1], set()).update(others - {name.split(".")[1]})
    assert {name: " ".join(sorted(others)) for name, others in found.items() if others} == STANDS_ON


def test_there_is_no_circle_and_no_long_chain() -> None:
    depths: dict[str, int] = {}

    def depth(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"a circle: {' -> '.join([*above, name])}"
        if name not in depths:
            below = own_imports(modules()[name]) - {name}
            depths[name] = 1 + max((depth(other, (*above, name)) for other in below), default=0)
        return depths[name]

    assert max(map(depth, modules())) <= MAX_CHAIN


def test_modelling_code_travels_alone() -> None:
    found = {name.split(".")[0] for path in (MODELLING, READING) for name in imports(path)}
    others = (
        found - set(sys.stdlib_module_names) - {"av", "pillow_heif", "scipy", "simplejpeg"}
    )  # of some files, and asked for there
    assert others == {"PIL", "mm_utils", "numpy", "torch", "transformers"}
    assert own_imports(MODELLING) == {"model.reading"}
    assert not own_imports(READING)


def test_one_module_asks_torch_distributed() -> None:
    """Except `rendezvous`, before there are ranks; the classes of sharded modules know nothing of them."""
    for name, path in [*modules().items(), *((path.stem, path) for path in SCRIPTS)]:
        if name in ("distributed", "extras.elastic.rendezvous"):
            continue
        named = {each for each in imports(path) if each.startswith("torch.distributed")}
        assert all(each.startswith(("torch.distributed.fsdp.", "torch.distributed.tensor.")) for each in named), path
        attributes = [node for node in nodes(path) if isinstance(node, ast.Attribute) and node.attr == "distributed"]
        assert "torch.distributed" not in {ast.unparse(node) for node in attributes}, path


def test_what_one_rank_does_for_all_is_done_by_one_function() -> None:
    alone = {"broadcast_object_list", "main_process_first"}  # an error there would leave the others waiting
    for path in [*modules().values(), *SCRIPTS]:
        if path.name != "distributed.py":
            found = alone & {each.id for each in nodes(path) if isinstance(each, ast.Name)}
            assert not found | (alone & {each.attr for each in nodes(path) if isinstance(each, ast.Attribute)}), path


def test_totals_stay_within_their_budgets() -> None:
    found = totals()
    over = [f"{name}: {found[name]:,} lines of {most:,}" for name, most in BUDGETS.items() if found[name] > most]
    assert not over, f"{over}; make room, or raise the number in tests/kit/house.py with a line in docs/decisions.md"


def test_searching_loads_few_modules() -> None:
    assert len(loaded_by(ROOT / "scripts/search.py", set())) <= SEARCH_MODULES


def test_nobody_imports_scripts_tests_or_benchmarks() -> None:
    for path in [*modules().values(), *SCRIPTS]:
        assert not {name.split(".")[0] for name in imports(path)} & {"scripts", "tests", "benchmarks"}, path


def test_no_test_imports_from_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        taken = [name for name in imports(path) if name.startswith("tests.") and ".test_" in name]
        assert not taken, f"{path} imports {taken}; what tests share stands in tests/kit"


def test_modules_have_a_subject() -> None:
    for path in modules().values():
        assert not {"utils", "common", "helpers", "misc"} & set(path.stem.split("_")), path


def test_functions_and_constructors_stay_small() -> None:
    for path in [*modules().values(), *SCRIPTS]:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= MAX_FUNCTION, f"{path}: {node.name} has {length} lines"
                if node.name == "__init__":
                    count = len(node.args.args) - 1 + len(node.args.kwonlyargs)
                    assert count <= MAX_ARGUMENTS or path == MODELLING, (
                        f"{path}: a constructor takes {count} arguments"
                    )


def test_scripts_are_stories() -> None:
    for path in SCRIPTS:
        assert lines(path) <= 140
        assert ast.get_docstring(tree(path))
        functions = [node for node in tree(path).body if isinstance(node, ast.FunctionDef)]
        assert [node.name for node in functions] == ["main"], f"{path} defines more than main"
        assert ast.unparse(functions[0].args).startswith("argv")
        assert "is_main_process" not in path.read_text(encoding="utf-8")
