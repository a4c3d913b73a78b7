"""A wrong flag ends a script or a benchmark with exit status 2 and one line that names the flag."""

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
    ("benchmarks.learning", "--contestants cca,nobody", "--contestants has nobody"),
    ("benchmarks.learning", "--seeds '0;1'", "--seeds is '0;1'"),
    ("benchmarks.learning", "--minutes 0", "--minutes is 0"),
    ("benchmarks.learning", "--output_file a.md", "--output_file is a.md"),
    ("benchmarks.ablate", "", "--grid is missing"),
    ("benchmarks.ablate", "--grid g --seeds 0", "--seeds is 0"),
    ("benchmarks.ablate", "--grid g --max_steps 0", "the budget is {'max_steps': 0}; give one of them, above 0"),
    ("benchmarks.ablate", "--grid g --max_steps 1 --num_train_epochs 1", "give one of them"),
    ("benchmarks.training", "--contestants tandem,clip", "--contestants has clip; choose from tandem,"),
    ("benchmarks.training", "--batch_sizes 64,x", "--batch_sizes is '64,x'"),
    ("benchmarks.training", "--caption_lengths long", "--caption_lengths is 'long'"),
    ("benchmarks.training", "--rounds 0", "count from 1"),
    ("benchmarks.efficiency", "", "--target is None"),
    ("benchmarks.efficiency", "--target 0.5 --flags a", "write name=value"),
    ("benchmarks.reliability", "--parts resume,fire", "--parts has fire; choose from resume,kill,"),
    ("benchmarks.reliability", "--contestants tandem,lightning", "--contestants has lightning; choose from tandem,"),
    ("benchmarks.reliability", "--kills 0", "--kills 0; both count from 1"),
    ("benchmarks.data.loading", "--contestants datasets,dali", "--contestants has dali; choose from datasets,"),
    ("benchmarks.data.loading", "--rounds 0", "count from 1"),
    ("benchmarks.data.loading", "--images 100", "--images is 100"),
    ("benchmarks.data.loading", "--train_file nowhere.jsonl", "--train_file is nowhere.jsonl; there is no such file"),
    ("benchmarks.loss", "--pairs 1", "--pairs is '1'"),
    ("benchmarks.processes.gradients", "--processes 0", "--processes is '0'; write numbers above 0"),
    ("benchmarks.processes.gradients", "--processes x", "--processes is 'x'; write numbers above 0"),
    ("benchmarks.processes.gradients", "--processes 2,,3", "--processes is '2,,3'; write numbers above 0"),
    ("benchmarks.processes.gradients", "--processes 1,-2", "--processes is '1,-2'; write numbers above 0"),
    ("benchmarks.processes.gradients", "--processes 5", "--pairs is 24; give a multiple of 10, 20 or more"),
    ("benchmarks.processes.gradients", "--processes 2 --pairs 4", "--pairs is 4; give a multiple of 4, 8 or more"),
    ("benchmarks.processes.gradients", "--embedding_dim 1", "--embedding_dim is 1; give 2 or more"),
    ("benchmarks.processes.gradients", "--process 1", "Did you mean '--processes'?"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "message"), MISTAKES)
def test_mistakes_in_the_flags_end_with_status_2(
    name: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(shlex.split(flags))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
