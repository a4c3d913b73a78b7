"""A tiny corpus on disk, and the flags that make a run take seconds."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # as in an active environment
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests and their processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not [*Path("/dev").glob("nvidia*")]:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU, its kernels are tried on the CPU

import pytest
from hypothesis import settings
from tqdm import tqdm

from tests.kit.corpora import COLOURS, SHAPES, draw, finetuning_flags, pretrained, questions, scratch_run, write_corpus  # noqa: F401
from tests.kit.hub import server  # noqa: F401
from tests.kit.numbered_rows import tokenizer  # noqa: F401

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=10)
settings.register_profile("explore", deadline=None)  # python -m pytest --hypothesis-profile=explore
settings.load_profile("repeatable")

# Forked processes share the lock of progress bars with this one: one that is killed may take it along, for ever.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

_MYSELF = os.getpid()
_FLUSHED = set()


def _end_with_the_tests() -> None:
    """Kill this fork when its parent ends: it would hold the pipe that says that the parent is gone."""
    if sys.platform == "linux" and os.getppid() == _MYSELF:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


os.register_at_fork(after_in_child=_end_with_the_tests)

LONGEST = ["processes", "signature", "export", "runs", "models", "terms", "stages"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tests out unless `-m` or the name of a test asks for them, and begin with the longest files."""
    if not config.option.markexpr and not any("::" in arg for arg in config.args):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through all that was imported; wait for no disk."""
    gc.collect()
    gc.freeze()
    os.fsync = lambda handle: _FLUSHED.add(os.fstat(handle).st_ino)


def pytest_unconfigure() -> None:
    """Let what was frozen end before the interpreter does, which some libraries complain of otherwise."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def empty_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the drawing, two thirds of a tiny run or preparation; fixtures of a whole module, and launched runs, do draw."""
    drawn = {
        "run.finish": ("plot_training", "draw_examples"),
        "data.prepare.report": ("draw_contact_sheet",),
    }
    for module, names in drawn.items():
        for name in names if f"mm_utils.{module}" in sys.modules else ():
            monkeypatch.setattr(sys.modules[f"mm_utils.{module}"], name, lambda *given, **_: given[-1].touch())


@pytest.fixture
def flushed() -> set[int]:
    """The inodes of the files that a test has flushed, in this process."""
    _FLUSHED.clear()
    return _FLUSHED


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the datasets cache below pytest's folders; all workers of a session share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "datasets"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_DATASETS_CACHE", str(folder))
        patched.setattr("datasets.config.HF_DATASETS_CACHE", folder)
        yield


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The datasets cache of one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the tiny corpus's JSONL file."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def tiny_flags(corpus: Path) -> list[str]:
    """Flags of a run on the tiny corpus that takes about a second."""
    return [
        *("--train_file", str(corpus), "--image_size", "32", "--global_batch_size", "8", "--max_steps", "4"),
        *("--logging_steps", "1", "--dataloader_num_workers", "0", "--rerank_top_k", "4", "--fusion_layers", "1"),
        *("--vision_config", "tiny", "--text_config", "tiny"),
    ]


@pytest.fixture
def children() -> Iterator[list[int]]:
    """The pids of processes that end with the test."""
    pids = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
