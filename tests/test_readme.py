"""README, docs and the notebook keep their word: commands parse or run, code runs, links, paths and flags exist."""

import ast
import contextlib
import importlib
import io
import json
import math
import random
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pytest
from accelerate.commands.launch import launch_command_parser
from PIL import Image
from torch.distributed.run import get_args_parser as torchrun_parser

from mm_utils.arguments import parse_args
from mm_utils.data.media.riff import read_avi
from mm_utils.launch.arguments import LaunchArguments, split_words
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.objectives.build import build_objective
from mm_utils.training.arguments import FinetuningArguments
from scripts import embed, prepare_data, pretrain
from tests.kit.commands import Command, parse
from tests.kit.corpora import COLOURS, draw
from tests.kit.jsonl import read_lines, write_lines
from tests.kit.objectives import assert_same, global_batch, share_of, step, step_in_parts, tiny_model
from tests.kit.processes import ROOT

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


STARTS = r"(?:[A-Z_]+=\S+ )*(?:accelerate launch|python|torchrun|pip) "


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the fenced blocks and the commands in code spans, in order, each with its language."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(rf"{BLOCK.pattern}|`({STARTS}[^`\n]+)`", text, BLOCK.flags):
        language, block, span = found.groups()
        if block is not None:
            yield language, block
        elif re.search(r"\.py\b| -m ", span):
            yield "bash", span


def command_lines(text: str) -> list[str]:
    for name, value in re.findall(r'\b([A-Z])="([^"]*)"', text):  # shorthands of a block of commands
        text = text.replace(f'{name}="{value}"', "").replace(f"${name} ", f"{value} ")
    lines = [
        line.lstrip("; ") for line in text.replace("\\\n", " ").splitlines() if not line.startswith(("#", "echo "))
    ]
    return [" ".join(line.partition("   #")[0].split()) for line in lines if line.strip()]


def launched(line: str) -> tuple[list[str], bool]:
    """Parse what stands before the script with the launcher's own parser; return the rest, and whether it is for several."""
    words = shlex.split(line)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:3] == ["ray", "job", "submit"]:
        words = words[words.index("--") + 1 :]
    if words[:2] == ["accelerate", "launch"]:
        given = launch_command_parser().parse_args(words[2:])
        assert given.config_file is None or Path(given.config_file).is_file(), line
        words = ["python", *(["-m"] if given.module else []), given.training_script, *given.training_script_args]
        return words, given.config_file is not None and "single" not in given.config_file
    if words[0] == "torchrun":
        given = torchrun_parser().parse_args(words[1:])
        return ["python", given.training_script, *given.training_script_args], True
    if "launchers/slurm.sbatch" in words:
        return ["python", *words[words.index("launchers/slurm.sbatch") + 1 :]], True
    if words[:2] == ["python", "scripts/launch_ray.py"]:
        own, script, rest = split_words(words[2:])
        parse_args(LaunchArguments, argv=own)
        assert script is not None, line
        return ["python", script, *rest], True
    return words, False


def understand(line: str) -> Command:
    """Return the script and its arguments; fail for a program that is not known, or a file that there is not."""
    words, distributed = launched(line)
    if words[0] == "kubectl" or words[:3] == ["python", "-m", "tests.golden"] or words[:2] == ["pip", "install"]:
        assert all((ROOT / word).is_file() for word in words if word.endswith((".yaml", ".txt"))), line
        return Command(line, None, [])
    if words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / word.split("::")[0]).exists() for word in words[3:] if word.startswith("tests")), line
        return Command(line, None, [])
    if words[0] == "make":
        assert all(f"\n{word}:" in (ROOT / "Makefile").read_text(encoding="utf-8") for word in words[1:]), line
        return Command(line, None, [])
    if words[:2] == ["ray", "start"]:
        return Command(line, None, [])
    assert words[0] == "python", f"a test should know how to check: {line}"
    name, argv = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
    module = name.removesuffix(".py").replace("/", ".")
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), line
    return Command(line, module, argv, distributed)


PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/*.md"), *ROOT.glob("mm_utils/**/*.md")]
)
PRESENT = [page for page in PAGES if page.stem != "CHANGELOG"]  # which tells of the past, too
CONFIGS = sorted(
    path for folder in ("recipes", "accelerate_configs", "launchers") for path in ROOT.glob(f"{folder}/*.yaml")
)
SOURCES = sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/[a-z]*.py")])
PROGRAMS = [path for path in SOURCES if "\ndef main(" in path.read_text(encoding="utf-8")]
# Flags of other programs that the pages name.
FOREIGN = {
    *("--batch-size", "--accum-freq", "--precision", "--train-data", "--epochs", "--warmup", "--resume", "--siglip"),
    *("--lock-image", "--local-loss", "--gather-with-grad", "--per_device_train_batch_size", "--bf16", "--warmup_steps"),
    *("--working-dir", "--head", "--signal", "--data-binary", "--shm-size", "--target", "--no-deps", "--rdzv_backend"),
    *("--url_list", "--input_format", "--url_col", "--caption_col", "--output_format", "--output_folder", "--thread_count"),
    *("--processes_count", "--local-dir"),
    *("--nodes", "--batch", "--prefix", "--requeue", "--kill-on-bad-exit", "--repo-type", "--private", "--exclude"),
}  # fmt: skip


# -- reading pages ------------------------------------------------------------------------------------------------------


def commands_of(path: Path) -> list[str]:
    """Return the commands of a page, of the comments of a YAML file, or of a script's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [line for language, block in blocks(path) if language == "bash" for line in command_lines(block)]
    if path.suffix == ".py":
        text = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)).__doc__ or ""
        return [line for line in command_lines(text) if re.match(STARTS, line)]
    comments = "\n".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    return [found for line in command_lines(comments) for found in re.findall(rf"{STARTS}.*", line)]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the repository's folders, and with the files that arguments name and parsers open."""
    for name in ("recipes", "accelerate_configs", "benchmarks", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "outputs/mine").mkdir(parents=True)
    (tmp_path / "outputs/mine/config.yaml").write_text("max_steps: 1\n")
    (tmp_path / "b32.json").touch()
    (tmp_path / "pairs.jsonl").write_text('{"image": "1.jpg", "caption": "a cup"}\n')
    for folder in ("photos", "words", "cifar10"):
        (tmp_path / folder).mkdir()
    for name in ("imagenet_templates.txt", "cifar10/zeroshot_classification_templates.txt"):
        (tmp_path / name).write_text("a photo of a {}.\n")
    (tmp_path / "words/lines.tsv").write_text("a cup\teine Tasse\n")
    (tmp_path / "my_terms.py").write_text(
        next(block for _, block in blocks(ROOT / "README.md") if "EmbeddingTerm" in block)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # behind the repository, whose modules stay imported
    return tmp_path


# -- every page ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [*PRESENT, *CONFIGS, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_parses_as_written(path, places, monkeypatch, capsys):
    for line in commands_of(path):
        command = understand(line)
        if command.module is None:
            continue
        try:
            parse(command, monkeypatch)
        except SystemExit:
            pytest.fail(f"{line}\n{capsys.readouterr().err}")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_paper_of_the_package_is_in_the_index() -> None:
    """An index that is kept by hand forgets."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "mm_utils").rglob("*.py"))
    papers = re.findall(r"arXiv\s+(\d{4}\.\d{5})", code)
    index = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    assert [paper for paper in papers if paper not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


@pytest.mark.parametrize("path", [*PRESENT, *CONFIGS], ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_modules_and_flags_that_are_named_exist(path):
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text(encoding="utf-8")))
    assert flags <= known_flags() | FOREIGN, flags - known_flags() - FOREIGN
    text = path.read_text(encoding="utf-8")
    folders = "mm_utils|scripts|benchmarks|tests|docs|recipes|accelerate_configs|launchers"
    for name in re.findall(rf"`((?:{folders})/[\w./*-]*)", text):
        assert [*ROOT.glob(name.rstrip("/"))], name
    for name in re.findall(rf"(?<![\w/])((?:{folders})(?:\.[a-z_]\w+)+)(?![\w/])", text):
        parts = name.removesuffix(".py").split(".")
        assert any(exists("/".join(parts[: len(parts) - drop])) for drop in range(2)), name


def exists(module: str) -> bool:
    return (ROOT / module).is_dir() or (ROOT / f"{module}.py").is_file()


@cache
def known_flags() -> set[str]:
    """Return the flags of all scripts and benchmarks, of the launchers, and of pytest's options that pages name."""
    known = {"--help-all"}
    for path in PROGRAMS:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
            module.main(["--help" if path.parent.name == "benchmarks" else "--help-all"])
        known |= set(re.findall(r"--\w+", shown.getvalue()))
    for parser in (launch_command_parser(), torchrun_parser()):
        known |= {option for action in parser._actions for option in action.option_strings}
    return known


# -- the README, run ----------------------------------------------------------------------------------------------------
def write_inputs(folder: Path, count: int = 72) -> None:
    """Write the photographs and captions that the README's commands read."""
    (folder / "photos").mkdir(exist_ok=True)
    noise = random.Random(0)
    rows = []
    for number in range(1, count + 1):
        colour = list(COLOURS)[number % len(COLOURS)]
        shape = ("circle", "square")[number % 2]
        image = draw(colour, shape, 72)
        spot = (noise.randrange(48), noise.randrange(48))
        image.paste(Image.effect_noise((24, 24), noise.uniform(20, 90)).convert("RGB"), spot)
        image.save(folder / f"photos/{number:04d}.jpg")
        captions = [f"a {colour} {shape}, number {number}", f"{shape} {number} in {colour}"]
        rows.append({"image": f"photos/{number:04d}.jpg", "caption": captions})
    write_lines(folder / "pairs.jsonl", rows)


# Of each script, what makes its commands end soon; the README's own arguments stay as they are.
SHORTER = {
    "scripts.pretrain": ["--max_steps", "1", "--max_eval_samples", "16", "--max_train_samples", "256"],
    "scripts.finetune": ["--max_steps", "1", "--max_eval_samples", "16"],
}


def run(command: Command) -> None:
    assert command.module is not None
    shorter = list(SHORTER.get(command.module, []))
    if command.module == "scripts.pretrain" and {"--dataset_name", "--train_file"} & {*command.argv}:
        shorter += ["--vision_config", "tiny", "--text_config", "tiny"]  # the recipe's encoders come from the Hub
    if "--resume_from_checkpoint" in command.argv:
        shorter[1] = "2"  # one step after the checkpoint
    importlib.import_module(command.module).main([*command.argv, *shorter])


@pytest.mark.slow
def test_the_readme_runs_from_its_first_line_to_its_last(places, monkeypatch, capsys):
    write_inputs(places)
    (places / "outputs/mine/config.yaml").unlink()
    (places / "outputs/mine").rmdir()
    monkeypatch.syspath_prepend(str(places))
    ran = []
    for language, block in blocks(ROOT / "README.md"):
        if language == "python" and "EmbeddingTerm" in block:
            (places / "my_terms.py").write_text(block)
        elif language == "python":
            capsys.readouterr()
            exec(compile(block, "README.md", "exec"), {})
            *shown, reranked = capsys.readouterr().out.splitlines()
            assert len(shown) == 3
            assert sorted(place for place, _ in ast.literal_eval(reranked)) == [0, 1, 2]
            assert all(re.fullmatch(r"-?\d\.\d{3}  photos/000[123]\.jpg", line) for line in shown)
        for command in map(understand, command_lines(block)) if language == "bash" else ():
            alike = (each.argv[: len(command.argv)] for each in ran if each.module == command.module)
            if command.module is None or command.is_distributed or (command.argv and command.argv in alike):
                continue
            run(command)
            ran.append(command)
    assert len(ran) >= 7
    assert "my_terms.Uniformity" in ran[-1].text
    records = (places / "outputs/pretrain-1/metrics.jsonl", places / "outputs/mine/metrics.jsonl")
    assert all(record.is_file() for record in records)
    assert (places / "outputs/mine/checkpoint-2").is_dir()
    [last] = sorted(places.glob("outputs/pretrain-*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)[-1:]
    assert "Uniformity_loss" in last.read_text()


@pytest.mark.parametrize(
    ("captions", "said"),
    [
        pytest.param("2,two\n1,one\n2,deux\n", None, id="another order, a second caption"),
        pytest.param("1,one\n", "2 images and 1 captions; .*'2'", id="fewer captions"),
        pytest.param("1,one\n2,two\n3,three\n", "'3'", id="more captions"),
    ],
)
def test_two_lists_are_joined_by_their_key(captions, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("images.csv").write_text("1,1.jpg\n2,2.jpg\n")
    Path("captions.csv").write_text(captions)
    [block] = [block for _, block in blocks(ROOT / "docs/data.md") if "captions.csv" in block]
    with pytest.raises(SystemExit, match=said) if said else contextlib.nullcontext():
        exec(compile(block, "docs/data.md", "exec"), {})
    if said is None:
        rows = read_lines(Path("joined.jsonl"))
        assert [" ".join(row.values()) for row in rows] == ["2.jpg two", "1.jpg one", "2.jpg deux"]


def test_the_loss_on_rows_of_the_docs_is_exact_in_parts_and_trains(places, monkeypatch):
    [block] = [block for _, block in blocks(ROOT / "docs/objectives.md") if "TermOnRows" in block]
    (places / "my_rows.py").write_text(block)
    objective = build_objective(tiny_model(), ObjectiveArguments("contrastive,my_rows.Preference:0.5"), 0)
    objective.model.double()
    batch = global_batch("matching_with_negatives")
    batch["negative_attention_mask"][:, 0] = 1  # every row has one
    right = step(objective, batch, 5)
    assert right["gradients"]["model.fusion.match.weight"].any()
    objective.zero_grad()
    assert_same(step_in_parts(objective, batch, 2), right)
    assert math.isfinite(step(objective, share_of(batch, 0, 0), 5)["report"]["loss"])

    write_inputs(places)
    lines = Path("pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"negatives": ["a wrong one"]} for line in lines]
    Path("negatives.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_of = "--train_file negatives.jsonl --vision_config tiny --text_config tiny --image_size 32 --global_batch_size 8 --max_steps 2"
    terms = "--objectives contrastive:1,my_rows.Preference:0.5 --logging_steps 1 --output_dir outputs/rows"
    pretrain.main([*run_of.split(), *terms.split()])
    records = read_lines(Path("outputs/rows/metrics.jsonl"))
    assert all(0 < record["Preference_loss"] < 2 for record in records if "Preference_loss" in record)
    assert any("Preference_accuracy" in record for record in records)


@pytest.mark.slow
def test_the_python_of_the_docs_runs(places, own_cache, monkeypatch, capsys):
    write_inputs(places)
    monkeypatch.syspath_prepend(str(places))
    pages = ROOT.glob("docs/[!j]*.md")  # pages of jobs run from their first line to their last, by hand
    found = [block for page in pages for language, block in blocks(page) if language == "python"]
    # One defines what another one names, one has a test of its own.
    found = [block for block in found if "PrintLoss()" not in block and "captions.csv" not in block]
    assert len(found) >= 3
    model = ["--train_file", "pairs.jsonl", "--image_size", "32", "--global_batch_size", "16", "--max_steps", "1"]
    model += ["--vision_config", "tiny", "--text_config", "tiny"]
    pretrain.main([*model, "--output_dir", "outputs/small"])
    embed.main(["--model_name_or_path", "outputs/small", "--images", "photos", "--index_dir", "outputs/index"])
    prepare_data.main(["--sources", "pairs.jsonl", "--output_dir", "data/mine", "--num_proc", "1"])
    frames = sorted(str(path) for path in Path("photos").glob("*.jpg"))[:2]
    write_lines(Path("frames.jsonl"), [{"id": "a", "frames": frames, "caption": "a cup is put down"}])
    for block in found:
        block = re.sub("outputs/mine|laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "outputs/small", block)
        exec(compile(block, "docs", "exec"), {"__name__": "docs"})
    shown = capsys.readouterr().out
    assert re.search(r"^3 -?\d\.\d{3} .*/photos/\d+\.jpg$", shown, re.MULTILINE)
    [clip] = read_lines(Path("clips.jsonl"))
    assert (clip["video"], read_avi(Path("a.avi").read_bytes())[1]) == ("a.avi", 2.0)


# -- the notebook ------------------------------------------------------------------------------------------------------
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
    names = {}
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
