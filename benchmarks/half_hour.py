"""Everything that one GPU is to be asked, in order of value, each section in a process of its own with a time limit.

    python -m benchmarks.gpu --half_hour                # an H100 or H200, at most 25 minutes
    python -m benchmarks.gpu --half_hour --tiny         # the same sections with tiny shapes, on any machine

A section that fails, runs out of memory or out of time is a line of the report, and the next one begins. `gpu.json` and `gpu.md`
are written after every section, so whatever ends the program, what was measured is there. `benchmarks.expected` reckons what to find.

A rehearsal has four times the time for a section and none for all, takes bf16 for fp16 where there is no GPU, and of `tests/gpu` the
quick ones, there on the CPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, machine

MINUTES = 25
_BASE = "--vision_config {b32} --text_config base --vocab_size 30522"
_B16 = "--vision_config base --text_config base --vocab_size 30522"
_TINY = "--vision_config tiny --text_config tiny --image_size 32 --vocab_size 100"
_TINY_SIZES = {
    "--pairs": "8", "--batch_sizes": "8", "--caption_lengths": "8", "--rounds": "1", "--steps": "1",
    "--steps_per_round": "1", "--max_steps": "4",
}  # fmt: skip


@dataclass
class Section:
    """One question, and the command that answers it.

    Attributes:
        title: the heading in the report.
        words: what follows `python`.
        seconds: the time limit.
        precision: mixed precision of the process.
        reports: whether the command takes `--output_file`.
    """

    title: str
    words: str
    seconds: int
    precision: str = "bf16"
    reports: bool = True


SECTIONS = (
    Section("Right before fast", "-m pytest -q -x tests/gpu", 150, reports=False),
    Section(
        "ViT-B/32 and BERT: utilisation, beside the plain loop",
        f"-m benchmarks.gpu {_BASE} --objectives_tried contrastive --loops tandem,bare --pairs 4096,1024,256 --compiled false",
        240,
    ),
    Section(
        "The same, compiled",
        f"-m benchmarks.gpu {_BASE} --objectives_tried contrastive --loops tandem,bare --pairs 4096,1024 --compiled true",
        240,
    ),
    Section(
        "Loops of open_clip and transformers in one run with this project's",
        f"-m benchmarks.training --synthetic {_BASE} --caption_lengths 32 --batch_sizes 1024 --rounds 3 --steps_per_round 10 "
        "--contestants tandem,open_clip,transformers,tandem_cached_2,tandem_cached_8",
        240,
    ),
    Section(
        "fp16 with a loss scaler",
        f"-m benchmarks.gpu {_BASE} --objectives_tried contrastive --loops tandem,bare --pairs 1024 --compiled false",
        90,
        "fp16",
    ),
    Section(
        "fp32, with TF32 outside of the loss",
        f"-m benchmarks.gpu {_BASE} --objectives_tried contrastive --loops tandem --pairs 1024 --compiled false",
        90,
        "no",
    ),
    Section(
        "The default objective, and matching",
        f"-m benchmarks.gpu {_BASE} --objectives_tried contrastive,captioning/contrastive,matching --loops tandem --pairs 1024 "
        "--compiled false",
        120,
    ),
    Section(
        "ViT-B/16 and the automatic micro-batch",
        f"-m benchmarks.gpu {_B16} --objectives_tried contrastive --loops tandem --pairs 8192 --compiled false "
        "--micro_batch_size auto --rounds 1 --steps 3",
        150,
    ),
    Section("The loss alone, beside the plain one", "-m benchmarks.loss --pairs 8192,32768", 90, "no"),
    Section(
        "Bound by the loader or not: data_wait in the log",
        "scripts/pretrain.py --max_steps 200 --eval_steps 0 --overwrite_output_dir --output_dir {folder}/loader",
        90,
        reports=False,
    ),
)


def run_half_hour(file: Path, tiny: bool = False, sections: tuple[Section, ...] = SECTIONS) -> list[dict[str, Any]]:
    """Run all sections; return what each found, as it is written to `file` and to the `.md` beside it.

    Args:
        file: the JSON file.
        tiny: take tiny shapes and few steps, to rehearse.
        sections: what to run.
    """
    gpu = graphics()
    about, found = machine() | gpu, []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "b32.json").write_text('{"model_type": "vit", "patch_size": 32}', encoding="utf-8")
        end = time.monotonic() + 60 * MINUTES
        for place, section in enumerate(sections):
            limit = 4 * section.seconds if tiny else min(section.seconds, end - time.monotonic())
            result = Path(folder) / f"{place}.json"
            words = section.words.format(b32=f"{folder}/b32.json", folder=folder).split()
            words = _shrunk(words) if tiny else words
            pretended = {"TANDEM_GPU_TESTS": "cpu", "OMP_NUM_THREADS": "1"} if tiny and not gpu else {}
            precision = "bf16" if pretended and section.precision == "fp16" else section.precision
            if section.reports:
                words += ["--output_file", str(result)]
            begin = time.monotonic()
            status, tail = _run(words, limit, precision, pretended) if limit > 0 else ("no time was left", "")
            table = result.with_suffix(".md")
            found.append(
                {
                    "section": section.title,
                    "command": f"python {' '.join(words)}".replace(folder, "."),
                    "precision": precision,
                    "status": status,
                    "seconds": round(time.monotonic() - begin, 1),
                    "figures": json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None,
                    "text": table.read_text(encoding="utf-8") if table.is_file() else tail,
                }
            )
            file.write_text(json.dumps({"about": about, "sections": found}, indent=2) + "\n", encoding="utf-8")
            file.with_suffix(".md").write_text(_report(about, found), encoding="utf-8")
            sys.stdout.write(f"{section.title}: {status}, {found[-1]['seconds']:.0f} s\n")
            sys.stdout.flush()
    return found


def graphics() -> dict[str, str]:
    """The GPUs and their driver, asked without using them; empty where there is none."""
    fields = "name,driver_version,memory.total,clocks.max.sm"
    with suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        return {f"gpu ({fields})": " | ".join(answer.splitlines())} if answer else {}
    return {}


def _run(words: list[str], limit: float, precision: str, variables: dict[str, str]) -> tuple[str, str]:
    """Run Python with `words` for at most `limit` seconds; return how it ended and the end of its output."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ,
        **variables,
        "PYTHONPATH": path,
        "ACCELERATE_MIXED_PRECISION": precision,
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        status = "done" if process.returncode == 0 else f"failed with exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        output, _ = process.communicate()
        status = f"ended after its {limit:.0f} s"
    return status, "\n".join(output.splitlines()[-25:])


def _shrunk(words: list[str]) -> list[str]:
    """Return the words with tiny shapes and few steps."""
    models = [
        place for place, word in enumerate(words) if word in ("--vision_config", "--text_config", "--vocab_size")
    ]
    kept = [word for place, word in enumerate(words) if place not in models and place - 1 not in models]
    small = [_TINY_SIZES.get(before, word) for before, word in zip(["", *kept], kept, strict=False)]
    if small[1] == "benchmarks.loss":
        small[small.index("--pairs") + 1] = "64"
    if small[1] == "pytest":
        small += ["-k", "tiled or (contrastive and not matching)"]
    if small[0] == "scripts/pretrain.py":
        small += ["--max_train_samples", "256", "--max_eval_samples", "16"]
    return [*small, *(_TINY.split() if models else [])]


def _report(about: dict[str, str], found: list[dict[str, Any]]) -> str:
    parts = [f"# Half an hour on one GPU\n\n{'; '.join(f'{what}: {value}' for what, value in about.items())}\n"]
    for each in found:
        text = each["text"] if each["figures"] else f"```\n{each['text']}\n```"
        parts.append(
            f"## {each['section']}\n\n{each['status']}, {each['seconds']:.0f} s, precision {each['precision']}: "
            f"`{each['command']}`\n\n{text}\n"
        )
    return "\n".join(parts)
