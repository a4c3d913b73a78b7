"""A wrong flag ends a script with exit status 2 and one line that names the flag."""

import importlib
import shlex

import pytest

MISTAKES = [
    ("scripts.eval_retrieval", "", "--model_name_or_path is missing"),
    ("scripts.eval_retrieval", "--model_name_or_path x --benchmark flickr9k", "Did you mean 'flickr8k'?"),
    ("scripts.eval_retrieval", "--model_name_or_path x --rerank_weights match:-1", "--rerank_weights is match:-1"),
    ("scripts.eval_zero_shot", "", "--model_name_or_path is missing"),
    ("scripts.eval_zero_shot", "--model_name_or_path x", "--dataset_name is missing"),
    ("scripts.eval_zero_shot", "--model_name_or_path x --classes cifar11", "no such benchmark. Known are imagenet1k, "),
    ("scripts.eval_zero_shot", "--model_name_or_path x --dataset_name y --templates '{}' 'a photo'", "--templates is a photo"),
    ("scripts.eval_zero_shot", "--model_name_or_path x --per_device_eval_batch_size 0", "--per_device_eval_batch_size is 0"),
    ("scripts.embed", "--index_dir x", "--model_name_or_path is missing"),
    ("scripts.embed", "--model_name_or_path x", "--index_dir is missing"),
    ("scripts.embed", "--model_name_or_path x --index_dir x --images x --split test", "has no splits"),
    ("scripts.export", "--model_name_or_path x --output_dir y --precision fp32,int4", "--precision is fp32,int4; give fp32, fp16, int8, each once"),
    ("scripts.export", "--model_name_or_path x --output_dir y --precision fp16,fp16", "--precision is fp16,fp16; give"),
    ("scripts.export", "--model_name_or_path x --output_dir y --layout tf", "--layout is tf; choose one of plain, transformers.js, immich"),
    ("scripts.export", "--model_name_or_path x --output_dir y --reranker maybe", "--reranker is maybe; choose one of auto, yes, no"),
    ("scripts.export", "--model_name_or_path x --output_dir y --layout immich --precision fp32,int8", "the layout immich has room for one"),
    ("scripts.export", "--model_name_or_path x --output_dir y --layout immich --reranker yes", "Immich has no re-ranking"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "message"), MISTAKES)
def test_mistakes_in_the_flags_end_with_status_2(
    name: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(shlex.split(flags))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
