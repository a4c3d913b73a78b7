"""The evaluation script on a run of a few steps: the files it leaves, and what it says to bad input."""

import json
from pathlib import Path

import pytest

from scripts import eval_retrieval, pretrain
from tests.scripts.test_pretrain import ROOT, launch


@pytest.fixture(scope="module")
def flags(tiny_flags: list[str], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a model of a few steps."""
    folder = str(tmp_path_factory.mktemp("started"))
    pretrain.main([*tiny_flags, "--output_dir", folder])
    data = ["--train_file", str(corpus), "--dataloader_num_workers", "0"]
    return ["--model_name_or_path", folder, *data, "--rerank_top_k", "4", "--rerank_weights", "caption:1"]


def test_figures_curve_and_picture_are_left(flags: list[str], tmp_path: Path) -> None:
    found = eval_retrieval.main([*flags, "--output_dir", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == found
    report = json.loads((tmp_path / "out/reranking.json").read_text())
    assert [row["candidates"] for row in report["text_to_image"]["curve"]] == [1, 2, 4]
    assert report["text_to_image"]["reranked"]["recall@1"]["value"] == found["rerank_text_to_image_recall@1"]
    assert report["costs"]["gflop_per_pair"] > 0
    assert (tmp_path / "out/reranking.png").stat().st_size > 10_000
    full = json.loads((tmp_path / "out/embedding_sizes.json").read_text())[0]
    assert full["recall@1"]["value"] == found["text_to_image_recall@1"]


def test_memory_and_the_batch_size_change_nothing(flags: list[str]) -> None:
    others = ["--per_device_eval_batch_size", "3", "--rerank_cache_gb", "1e-9"]
    assert eval_retrieval.main([*flags, *others]) == pytest.approx(eval_retrieval.main(flags), rel=1e-4)


def test_a_weight_of_zero_leaves_the_order_of_the_towers(flags: list[str]) -> None:
    found = eval_retrieval.main([*flags, "--rerank_weights", "caption:0"])
    for k in (1, 5, 10):
        assert found[f"rerank_text_to_image_recall@{k}"] == found[f"text_to_image_recall@{k}"]


def test_a_split_that_is_not_there(flags: list[str]) -> None:
    with pytest.raises(ValueError, match="--split is test; the data has train, validation"):
        eval_retrieval.main([*flags, "--split", "test"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model_name_or_path is missing"),
        (["--model_name_or_path", "x", "--rerank_weights", "match:-1"], "--rerank_weights is match:-1"),
    ],
)
def test_mistakes_in_the_flags_end_with_status_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        eval_retrieval.main(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_find_what_one_finds(flags: list[str], tmp_path: Path) -> None:
    config = str(ROOT / "accelerate_configs/two_processes.yaml")
    flags = [*flags, "--max_eval_samples", "7"]
    script = [str(ROOT / "scripts/eval_retrieval.py"), *flags, "--output_dir", str(tmp_path)]
    two = launch(["--config_file", config, *script], tmp_path, ACCELERATE_USE_CPU="true")
    assert two.returncode == 0, two.stderr
    assert "2 x cpu" in two.stderr + two.stdout
    one = eval_retrieval.main(flags)
    assert json.loads((tmp_path / "metrics.json").read_text()) == pytest.approx(one, rel=1e-4)


def test_reranking_is_off_by_default_where_it_did_not_help(flags: list[str]) -> None:
    """Eight images fit no weight."""
    found = eval_retrieval.main([*flags, "--rerank_weights", "fitted"])
    assert not any(name.startswith("rerank") for name in found)
