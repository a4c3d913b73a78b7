"""What benchmarks compare is the same loss and the same model, and a step reads nothing of its device."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu, harness, loss, peers, processes
from mm_utils.model.arguments import ModelArguments
from mm_utils.objectives.losses import gather_batch, info_nce

READING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}
_INDEXING = {"index", "index_put", "index_put_"}


class HostReads(TorchDispatchMode):
    """Count in `found`, within a `with` block, how often a line, as `file.py:function`, reads a value of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __enter__(self) -> "HostReads":
        tolist = self._tolist = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:  # of a CPU's tensor, it is not an operation
            self._count()
            return tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign, assignment]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in READING or by_mask:
            self._count()
        return func(*args, **(kwargs or {}))

    def _count(self) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and not re.search("(mm_utils|transformers|accelerate)/", frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or frame.f_code.co_name != "to_device":
            place = "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
            self.found[place] += 1


class InThisProcess:
    """A contestant without a process of its own, which would import everything again."""

    def __init__(self, make: Callable[[Any], Callable[[Any], dict[str, Any]]], task: Any):
        self.answer, self.error = make(task), None

    def ask(self, question: Any = None) -> dict[str, Any]:
        return self.answer(question)

    def end(self) -> None:
        pass


@pytest.fixture
def in_this_process(monkeypatch):
    for module in (harness, loss):
        monkeypatch.setattr(module, "Contestant", InThisProcess)
    monkeypatch.setattr("logging.disable", lambda *_: None)


def table(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the last table that was printed, without its head."""
    lines = capsys.readouterr().out.splitlines()
    begin = max(place for place, line in enumerate(lines) if line.startswith("|---"))
    return [line for line in lines[begin + 1 :] if line.startswith("|")]


def test_the_compared_losses_are_equal(in_this_process, capsys):
    rows = loss.main(["--pairs", "64,256", "--repeats", "1"])
    assert len(table(capsys)) == 4
    tiled, naive = ([row["value"] for row in rows if row["loss"] == name] for name in ("tiled", "naive"))
    assert tiled == pytest.approx(naive, rel=1e-5)
    image_NE, text_NE = (normalize(torch.randn(6, 4), dim=-1) for _ in range(2))
    right = info_nce(
        image_NE, text_NE, torch.tensor(9.0), gather_batch(image_NE, text_NE, torch.arange(12).view(6, 2))
    )
    torch.testing.assert_close(peers.clip_loss()(image_NE, text_NE, torch.tensor(9.0)), right)


def flags_for(corpus: Path) -> list[str]:
    return ["--train_file", str(corpus), "--image_size", "32", "--dataloader_num_workers", "0", "--batch_size", "8"]


def test_contestants_train_the_same_model(corpus):
    parser = argparse.ArgumentParser()
    peers.add_data_flags(parser)
    bench = peers.Bench(parser.parse_args(flags_for(corpus)))
    stock, pixels, tokens = bench.stock_model(), torch.randn(8, 3, 32, 32), bench.random_tokens(9, 12)
    with torch.no_grad():
        found = stock(pixel_values=pixels, **tokens)
        right = bench.model.encode_image(pixels)[0], bench.model.encode_text(*tokens.values())[0]
    torch.testing.assert_close((found.image_embeds, found.text_embeds), right)
    counts = [sum(weight.numel() for weight in model.parameters()) for model in (stock, bench.model)]
    assert counts[0] == counts[1]


def test_gradients_are_compared_with_those_in_fp64(corpus, capsys):
    """On one process, all losses have the right gradient, up to the digits of the precision; of several: by hand."""
    rows = processes.main([*flags_for(corpus), "--processes", "1", "--steps", "1"])
    assert len(table(capsys)) == len(rows) == len(processes.CASES)
    for row in rows:
        low, high = (1e-4, 0.5) if row["precision"] == "bf16" else (1e-9, 1e-4)
        assert low < row["distance"] < high
        assert row["cosine"] == pytest.approx(1, abs=high)


@pytest.mark.parametrize("objectives", ["contrastive", "contrastive,captioning", "contrastive,matching"])
def test_a_step_waits_for_its_device_at_its_ends(objectives):
    """A read between them would drain a GPU's queue; a change that adds one must be seen here."""
    setting = {"loop": "tandem", "objectives": objectives, "pairs": 12, "compiled": False}
    sizes = ModelArguments(vision_config="tiny", text_config="tiny", image_size=32)
    step, _ = gpu.make_step(gpu.make_accelerator(), setting, sizes, 100, None)
    step(10**6 - 2)  # of the head's stage, where there is one
    with HostReads() as reads:
        step(10**6 - 1)
    of_cpu = {"optimizer.py:step"}  # which a fused one, as on a GPU, does not read
    assert set(reads.found) - of_cpu == {"losses.py:call_roll", "skipped.py:may_move"}, reads.found
