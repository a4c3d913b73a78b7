"""Parallel sentences: targets of the whole model, the same for any parts and ranks, and refused where they would do nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mm_utils.extras.families.sentences import Sentences, read_lines
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from scripts import pretrain
from tests.extras.families.letters import write_bert
from tests.kit.launches import logged, losses, on_two_processes, weights
from tests.kit.stock_folders import write_stock

pytestmark = pytest.mark.usefixtures("own_cache")
LINES = "a red circle\tein roter kreis\na blue square\tein blaues quadrat\nthree stars\tdrei sterne\n"


@pytest.fixture
def flags(tiny_flags: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "lines.tsv").write_text(LINES)
    towers = ["--model_name_or_path", write_stock(tmp_path / "start", "clip")]
    towers += ["--text_model_name_or_path", write_bert(tmp_path / "words")]
    head = ["--fusion_layers", "0", "--closed_form_images", "0", "--learning_rate", "3e-3", "--rerank_top_k", "0"]
    run = [*tiny_flags[:2], *tiny_flags[4:10], *towers, *head]
    return [*run, "--set", f"parallel_sentences={tmp_path / 'lines.tsv'}"]


def test_sentences_alone_bring_a_language_to_where_the_whole_model_has_its_own(
    flags: list[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    more = ["--objectives", "sentences", "--max_steps", "60", "--backbone_learning_rate", "3e-3"]
    pretrain.main([*flags, *more, "--output_dir", out])
    start, model = (load_model(each).eval() for each in (str(tmp_path / "start"), out))

    def embeds(of: Any, folder: str, column: int) -> torch.Tensor:
        tokens = load_processor_of(folder).tokenizer(
            [line[column] for line in read_lines(str(tmp_path / "lines.tsv"))], padding=True, return_tensors="pt"
        )  # type: ignore[attr-defined]
        with torch.no_grad():
            return of.encode_text(tokens.input_ids, tokens.attention_mask)[0]

    right = embeds(start, str(tmp_path / "start"), 0)
    for column in (0, 1):
        cosines = embeds(model, out, column) @ right.T
        assert (cosines.diag() > 0.9).all()
        assert cosines.argmax(1).tolist() == [0, 1, 2]
    cosine = logged(Path(out), "sentences_cosine")
    assert cosine[60] > 0.9 > cosine[1]


def test_parts_of_a_batch_and_a_resumed_run_learn_the_same(flags: list[str], tmp_path: Path) -> None:
    run = [*flags, "--objectives", "contrastive,sentences:2", "--max_steps", "4", "--load_best_model_at_end", "false"]
    pretrain.main([*run, "--save_steps", "2", "--output_dir", str(tmp_path / "out")])
    resume = ["--resume_from_checkpoint", str(tmp_path / "out/checkpoint-2"), "--save_steps", "2"]
    pretrain.main([*run, *resume, "--micro_batch_size", "3", "--output_dir", str(tmp_path / "again")])
    first = weights(tmp_path / "out")
    for name, value in weights(tmp_path / "again").items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=2e-4, msg=name)
    (tmp_path / "lines.tsv").write_text(LINES.replace("drei", "vier"))
    with pytest.raises(ValueError, match=r"sentences was \w+ and is \w+"):
        pretrain.main([*run, *resume, "--output_dir", str(tmp_path / "refused")])


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(flags: list[str], tmp_path: Path, own_cache: Path) -> None:
    run = [*flags, "--objectives", "contrastive,sentences:2", "--max_steps", "4"]
    on_two_processes([*run, "--output_dir", str(tmp_path / "two")], own_cache)
    pretrain.main([*run, "--output_dir", str(tmp_path / "alone")])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)


def test_what_is_missing_is_named(flags: list[str], tiny_flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sentences is not a term of --objectives, and it would have no effect"):
        pretrain.main(flags)
    with pytest.raises(ValueError, match=r"Give --set parallel_sentences=lines\.tsv"):
        pretrain.main([*tiny_flags, "--objectives", "contrastive,sentences"])
    for text, reason in (
        ("one\n", "no two sentences"),
        ("a\tb\nc\n", "sentence 2: 1 languages"),
        (None, "cannot be read"),
    ):
        path = tmp_path / "wrong.tsv"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_lines(str(path))
    (tmp_path / "marked.tsv").write_bytes(b"\xef\xbb\xbfone\ttwo\r\n")  # as spreadsheets write it
    assert read_lines(str(tmp_path / "marked.tsv")) == [["one", "two"]]
    assert Sentences.refuses
