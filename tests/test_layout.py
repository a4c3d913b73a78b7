"""The architecture: which module may import which, and how large a script may grow."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mm_utils"
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))

LAYERS = {
    0: {"arguments", "flat_yaml", "interruption", "jsonl", "meeting", "processes", "ranks", "safe_text"},
    1: {"data", "modeling_fusion_dual_encoder", "wordpiece", "models", "losses", "noise", "optim", "padding"}
    | {"failures", "pretrained"},
    2: {
        "objectives",
        "metrics",
        "averaging",
        "sharding",
        "backends",
        "snapshot",
        "grad_cache",
        "feature_cache",
        "flops",
        "memory",
    }
    | {"intervals", "ranking", "reranking", "split_embeddings", "word_order", "skipped"}
    | {"adapters", "classification"}
    | {"watchdog", "stragglers"},
    3: {
        "trainer",
        "training_arguments",
        "callbacks",
        "checkpoints",
        "rotation",
        "saving",
        "persistence",
        "stepping",
        "reporting",
        "model_card",
        "hub",
        "run",
        "finish",
    }
    | {"monitor", "benchmarks", "forecast", "sandbox", "dry_run", "data_report", "data_pictures", "diagnosis"}
    | {"zero_shot", "retrieval_report", "regions"}
    | {"finetuning", "interpolation"}
    | {"spool", "upload", "tracking"}
    | {"preflight", "starting", "environment"}
    | {"ablation", "ablation_report"},
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
PARTS = ("data", "objectives")  # packages; a metric's own folder is none of them
NO_SUBJECT = {"utils", "common", "helpers", "misc"}
LONGEST_SCRIPT = 180


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name without `mm_utils.`."""
    files = [*PACKAGE.glob("*.py"), *(path for part in PARTS for path in (PACKAGE / part).rglob("*.py"))]
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in files if path.stem != "__init__"
    }


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it, `from package import module` as `package.module`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write mm_utils. in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, by top-level name."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("mm_utils.")}


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[0] for name in modules()} == set(LAYER_OF)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name: str) -> None:
    layer = LAYER_OF[name.split(".")[0]]
    above = {other for other in own_imports(modules()[name]) if LAYER_OF[other] > layer}
    assert not above, f"{name}, of layer {layer}, imports {above}"


@pytest.mark.parametrize("name", sorted(name for name in modules() if name.startswith("data.")))
def test_data_knows_no_model(name: str) -> None:
    assert own_imports(modules()[name]) <= {"arguments", "ranks", "data"}


@pytest.mark.parametrize("name", sorted(name for name in modules() if name.startswith("data.")))
def test_raw_sources_know_nothing_of_what_becomes_of_them(name: str) -> None:
    """`data.raw` <- `data` <- `data.stream`, and `data.prepare` beside; the loaders alone see streams."""
    part = name.split(".")[1] if name.count(".") == 2 else ""
    allowed = {"raw": {"raw"}, "prepare": {"raw", "", "prepare"}, "stream": {"raw", "", "stream"}, "": {"raw", ""}}[
        part
    ]
    if name == "data.loaders":
        allowed = allowed | {"stream"}
    parts = {"raw", "prepare", "stream"}
    found = {other.split(".")[2] for other in imports(modules()[name]) if other.startswith("mm_utils.data.")}
    assert {other if other in parts else "" for other in found} <= allowed


def test_modelling_code_travels_alone() -> None:
    found = {name.split(".")[0] for name in imports(PACKAGE / "modeling_fusion_dual_encoder.py")}
    assert found <= {"collections", "copy", "dataclasses", "itertools", "math", "torch", "transformers", "typing"}


def test_only_ranks_asks_torch_distributed() -> None:
    """But for `meeting`, before there are any. The classes of sharded modules and tensors know nothing of them, and may be named."""
    for path in [*modules().values(), *SCRIPTS]:
        if path.stem in ("ranks", "meeting"):
            continue
        assert not any(
            name.startswith("torch.distributed")
            and not name.startswith(("torch.distributed.fsdp.", "torch.distributed.tensor."))
            for name in imports(path)
        ), path
        attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        assert "torch.distributed" not in {ast.unparse(node) for node in attributes}, path


def test_nobody_imports_scripts() -> None:
    scripts = {path.stem for path in SCRIPTS}
    for path in [*modules().values(), *SCRIPTS]:
        names = {name.split(".")[0] for name in imports(path)}
        assert not names & (scripts | {"scripts", "tests"}), path


def test_no_module_without_a_subject() -> None:
    assert not NO_SUBJECT & {part for path in [*modules().values(), *SCRIPTS] for part in path.stem.split("_")}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_stories(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_SCRIPT
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    [main] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert ast.unparse(main.args).startswith("argv")


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import torch.distributed as dist\n\ndef f():\n    from mm_utils.trainer import Trainer\n")
    assert imports(path) == {"torch.distributed", "mm_utils.trainer.Trainer"}
    assert own_imports(path) == {"trainer"}
