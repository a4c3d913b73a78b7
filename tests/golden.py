"""Small runs of this checkout and of an earlier revision, compared to the last digit: has a change altered what is learnt?

    python -m tests.golden main                               # all runs; exit status 1 if one differs
    python -m tests.golden main --only default,clip           # some of them, and those whose results they need
    python -m tests.golden main --expected lora,sounds        # these may differ

Both sides get the same inputs and the same Python environment, and only what their scripts leave on disk is compared: losses
and recalls, search hits, outputs of exported graphs, prepared rows. What the revision left is kept in the system's folder
for temporary files, by commit. A side takes about two minutes of one core.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(tempfile.gettempdir(), f"golden-{os.getuid()}")
FIGURE = re.compile(
    r"(loss|grad_norm|learning_rate|temperature|recall@\d+|(?<!train_)mean_recall|accuracy(@\d+)?|iou(@[\d.]+)?)$"
)


def figures(folder: Path) -> dict[str, Any]:
    """Losses and recalls by step; neither times nor memory."""
    found = {}
    for path in sorted(folder.rglob("metrics.json*")):
        for row in map(json.loads, path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]):
            found |= {f"step {row.get('step')} {name}": value for name, value in row.items() if FIGURE.search(name)}
    return found


def rows(folder: Path) -> dict[str, Any]:
    """Id, captions, annotations and digest of the medium of each prepared row."""
    import pyarrow as pa

    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.arrow")):
        for row in pa.ipc.open_stream(path).read_all().to_pylist():
            medium = next(row[name] for name in ("image", "audio", "video") if row.get(name))
            digest = hashlib.sha256(repr(medium).encode()).hexdigest()[:12]
            kept = [row.get(name) for name in ("id", "captions", "regions", "moments", "seconds")]
            found[f"{path.parent.name} row {len(found)}"] = [*kept, digest]
    return found


def hits(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "stdout.txt").read_text().splitlines() if line.startswith("{")]
    return {f"hit {n}": [Path(hit["path"]).name, hit["score"]] for n, hit in enumerate(lines)}


def graphs(folder: Path) -> dict[str, Any]:
    """Outputs of each ONNX graph for inputs that follow from their names and shapes."""
    import numpy as np
    import onnxruntime as ort

    one_thread = ort.SessionOptions()
    found = {}
    one_thread.intra_op_num_threads = 1
    for path in sorted(folder.rglob("*.onnx")):
        session = ort.InferenceSession(path, one_thread, ["CPUExecutionProvider"])
        inputs = {}
        for wanted in session.get_inputs():
            shape = [size if isinstance(size, int) else 3 for size in wanted.shape]
            ramp = np.arange(np.prod(shape)).reshape(shape)
            tokens = np.ones_like(ramp) if "mask" in wanted.name else ramp % 20 + 5
            inputs[wanted.name] = np.sin(ramp).astype(np.float32) if "float" in wanted.type else tokens
        for output, value in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            found[f"{path.stem} {output.name}"] = [list(value.shape), *value.ravel()[:8].tolist(), float(value.sum())]
    return found


class Case(NamedTuple):
    """A run: `$out` is its folder, `$data` that of the inputs, and `$name` that of an earlier case, whose results it needs.

    A command that begins with `ranks` runs as two processes; one that begins with `killed` gets SIGKILL at `checkpoint-4`.
    """

    name: str
    read: Callable[[Path], dict[str, Any]]
    commands: Sequence[str]


SHORT = (
    "--global_batch_size 8 --max_steps 4 --logging_steps 1 --eval_steps 0 --dataloader_num_workers 0 --output_dir $out"
)
FILE = "--train_file $data/pairs.jsonl"
SCRATCH = "--vision_config $data/vision.json --text_config $data/text.json --image_size 32"
HEAD = f"pretrain {SHORT} {SCRATCH} --fusion_layers 1 --rerank_top_k 4 {FILE}"
PLAIN = f"pretrain {SHORT} {SCRATCH} --fusion_layers 0 --objectives"
TOWERS = "--vision_model_name_or_path $data/vit --text_model_name_or_path $data/bert"
FROZEN = f"pretrain {SHORT} {TOWERS} --freeze_vision true --freeze_text true {FILE}"
CLIP = f"pretrain {SHORT} --model_name_or_path $data/clip --fusion_layers 0 --objectives contrastive {FILE}"
LONG = f"{PLAIN} contrastive {FILE} --save_steps 2".replace("max_steps 4", "max_steps 24")
LASTING = f"pretrain {SHORT} --text_config $data/text.json --fusion_layers 1 --rerank_top_k 4"
SOUNDS = f"{LASTING} --train_file $data/sounds.jsonl"
EVALUATE = "--rerank_top_k 8 --max_eval_samples 48"
SOURCES = ("pairs.jsonl", "pairs.csv", "pairs.parquet", "pairs.db", "imagefolder", "coco.json", "dataset.json",
           "captions.txt", "shards/{000..001}.tar", "classes,format=classes", "sounds.jsonl", "clips.jsonl")  # fmt: skip
CASES = [
    *(Case("rows_" + re.sub(r"\W+", "_", source).replace("_000_001_", "_"), rows,
           [f"prepare_data --num_proc 1 --output_dir $out/set --sources $data/{source}"]) for source in SOURCES),
    Case("default", figures, [f"pretrain {SHORT} --image_size 32 --max_train_samples 96 --max_eval_samples 32"]),
    Case("frozen", figures, [f"{FROZEN} --fusion_layers 1"]),
    Case("frozen_towers", figures, [f"{FROZEN} --fusion_layers 0 --objectives contrastive"]),
    Case("clip", figures, [CLIP]),
    Case("lora", figures, [f"{CLIP} --lora_rank 2"]),
    Case("wise_ft", figures, [f"{CLIP} --wise_ft true"]),
    Case("matching", figures, [f"{HEAD} --objectives contrastive:1,matching:1"]),
    Case("captioning", figures, [f"{HEAD} --objectives contrastive:1,captioning:1"]),
    Case("regions", figures, [f"{HEAD} --objectives contrastive:1,regions:1"]),
    Case("micro_batch", figures, [f"{HEAD} --micro_batch_size 3"]),
    Case("ranks", figures, [f"ranks {HEAD}"]),
    Case("sigmoid", figures, [f"{PLAIN} sigmoid {FILE}"]),
    Case("distillation", figures, [f"{PLAIN} contrastive:1,distillation:1 --teacher_name_or_path $data/clip {FILE}"]),
    Case("batch_size_schedule", figures, [f"{PLAIN} contrastive --batch_size_schedule 0:4,2:8 {FILE}"]),
    Case("resume", figures, [f"killed {LONG}", f"{LONG} --resume_from_checkpoint latest"]),
    Case("prepared", figures, [f"{PLAIN} contrastive --dataset_name $rows_pairs_jsonl/set"]),
    Case("stream_parquet", figures, [f"{PLAIN} contrastive --streaming true --train_file $data/pairs.parquet"]),
    Case("stream_tars", figures, [f"{PLAIN} contrastive --streaming true --train_file $data/shards/{{000..001}}.tar"]),
    Case("sounds", figures, [SOUNDS]),
    Case("moments", figures, [f"{SOUNDS} --objectives contrastive:1,moments:1"]),
    Case("clips", figures, [f"{LASTING} --image_size 32 --clip_frames 4 --train_file $data/clips.jsonl"]),
    Case("finetune", figures, [f"finetune {SHORT} --model_name_or_path $clip --dataset_name $data/classes"]),
    Case("retrieval", figures, [f"eval_retrieval --model_name_or_path $default --split test {EVALUATE} --output_dir $out"]),
    Case("zero_shot", figures, ["eval_zero_shot --model_name_or_path $clip --dataset_name $data/classes --output_dir $out"]),
    Case("search", hits, ["embed --model_name_or_path $clip --images $data/images --index_dir $out/index",
                          "search --index_dir $out/index --json true --query red-circle",
                          "search --index_dir $out/index --json true --image $data/images/7.png"]),
    Case("export", graphs, ["export --model_name_or_path $clip --output_dir $out/onnx"]),
]  # fmt: skip


def work(tree: str, tasks: list[tuple[str, list[str]]]) -> None:
    """Run the commands of each (folder, commands) in this process, so that libraries are imported once a tree."""
    for name, commands in tasks:
        shutil.rmtree(name, ignore_errors=True)
        (folder := Path(name)).mkdir(parents=True)
        with (folder / "stdout.txt").open("w") as out, contextlib.redirect_stdout(out):
            try:
                for command in commands:
                    run(tree, folder, command.split())
            except BaseException:
                (folder / "error.txt").write_text(traceback.format_exc())
        (folder / "done.json").write_text(json.dumps(commands))


def run(tree: str, folder: Path, words: list[str]) -> None:
    if words[0] not in ("ranks", "killed"):
        script = importlib.import_module(f"scripts.{words[0]}")
        assert str(script.__file__).startswith(tree), script.__file__
        script.main(words[1:])
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if words[0] == "ranks" else []
    command = [sys.executable, *launcher, f"{tree}/scripts/{words[1]}.py", *words[2:]]
    process = subprocess.Popen(command, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, stderr=subprocess.PIPE)
    while words[0] == "killed" and process.poll() is None:
        if (folder / "checkpoint-4").exists():
            process.kill()
        time.sleep(0.005)
    errors = process.communicate()[1].decode()
    assert process.returncode == (-9 if words[0] == "killed" else 0), f"exit status {process.returncode}: {errors}"


def run_side(tree: Path, folder: Path, cases: list[Case], inputs: Path) -> None:
    """Run what isn't in the folder yet."""
    names = {"data": str(inputs)} | {case.name: str(folder / case.name) for case in cases}
    tasks = []
    for case in cases:
        names["out"] = names[case.name]
        commands = [Template(text).substitute(names) for text in case.commands]
        done, error = (folder / case.name / name for name in ("done.json", "error.txt"))
        if error.exists() or not done.exists() or json.loads(done.read_text()) != commands:
            tasks.append((names[case.name], commands))
    folder.mkdir(parents=True, exist_ok=True)
    env = {"PYTHONPATH": str(tree), "HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
           "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    call = [sys.executable, "-P", str(Path(__file__).resolve()), "--work", json.dumps([str(tree), tasks])]
    with (folder / "log.txt").open("a") as log:
        if tasks:
            subprocess.run(call, cwd=folder, env=os.environ | env, stderr=log, stdout=log, check=False)


def difference(case: Case, before: Path, after: Path) -> str:
    """The first difference, or nothing."""
    for side, folder in (("before", before), ("now", after)):
        if (folder / "error.txt").exists() or not (folder / "done.json").exists():
            told = (folder / "error.txt").read_text() if (folder / "error.txt").exists() else "the process was ended"
            return f"{side} it failed: {told.strip().splitlines()[-1]}"
    then = case.read(before)
    now = case.read(after)
    if not then:
        return f"nothing to compare was left in {before}"
    names = [name for name in {**then, **now} if repr(then.get(name)) != repr(now.get(name))]  # NaN is equal to NaN
    return f"{names[0]}: {then.get(names[0])} before, {now.get(names[0])} now" if names else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--only", default="", help="names of runs, with commas")
    parser.add_argument("--expected", default="", help="names of runs that may differ, with commas")
    args = parser.parse_args()
    expected = args.expected.split(",")
    wanted = set(args.only.split(",")) if args.only else {case.name for case in CASES}
    if unknown := wanted.union(filter(None, expected)) - {case.name for case in CASES}:
        parser.error(f"no run is named {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}")
    needed = set(wanted)
    for case in reversed(CASES):
        if case.name in needed:
            needed |= set(re.findall(r"\$(\w+)", " ".join(case.commands)))
    cases = [case for case in CASES if case.name in needed]
    inputs = KEPT / hashlib.sha256((ROOT / "tests/kit/golden_inputs.py").read_bytes()).hexdigest()[:12]
    KEPT.mkdir(exist_ok=True)
    git = ["git", "-C", str(ROOT)]
    failed = 0
    commit = subprocess.check_output([*git, "rev-parse", f"{args.revision}^{{commit}}"], text=True).strip()
    with tempfile.TemporaryDirectory() as name, (KEPT / f"{commit}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two comparisons with one revision share what it leaves
        tree = Path(name, "tree").resolve()
        now = Path(name, "now")
        if not inputs.exists():
            importlib.import_module("tests.kit.golden_inputs").write_inputs(Path(name, "inputs"))
            shutil.copytree(Path(name, "inputs"), inputs)
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            run_side(tree, KEPT / commit, cases, inputs)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
            fcntl.flock(lock, fcntl.LOCK_UN)
        run_side(ROOT, now, cases, inputs)
        for case in (case for case in cases if case.name in wanted):
            found = difference(case, KEPT / commit / case.name, now / case.name)
            failed += bool(found) and case.name not in expected
            print(f"{case.name:22}{'(expected) ' * (case.name in expected)}{found or 'equal'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(work(*json.loads(sys.argv[2])) if sys.argv[1:2] == ["--work"] else main())
