"""A wrong flag of a benchmark ends it with exit status 2 and one line that names the flag."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("learning", ["--contestants", "cca,nobody"], "--contestants has nobody"),
        ("learning", ["--seeds", "0;1"], "--seeds is '0;1'"),
        ("learning", ["--minutes", "0"], "--minutes is 0"),
        ("learning", ["--output_file", "a.md"], "--output_file is a.md"),
        ("ablate", [], "--grid is missing"),
        ("ablate", ["--grid", "g", "--seeds", "0"], "--seeds is 0"),
        ("ablate", ["--grid", "g", "--max_steps", "0"], "the budget is {'max_steps': 0}; give one of them, above 0"),
        ("ablate", ["--grid", "g", "--max_steps", "1", "--num_train_epochs", "1"], "give one of them"),
        ("training", ["--contestants", "tandem,clip"], "--contestants has clip; choose from tandem,"),
        ("training", ["--batch_sizes", "64,x"], "--batch_sizes is '64,x'"),
        ("training", ["--caption_lengths", "long"], "--caption_lengths is 'long'"),
        ("training", ["--rounds", "0"], "count from 1"),
        ("efficiency", [], "--target is None"),
        ("efficiency", ["--target", "0.5", "--flags", "a"], "write name=value"),
        ("reliability", ["--parts", "resume,fire"], "--parts has fire; choose from resume,kill,"),
        ("reliability", ["--contestants", "tandem,lightning"], "--contestants has lightning; choose from tandem,"),
        ("reliability", ["--kills", "0"], "--kills 0; both count from 1"),
        ("data.loading", ["--contestants", "datasets,dali"], "--contestants has dali; choose from datasets,"),
        ("data.loading", ["--rounds", "0"], "count from 1"),
        ("data.loading", ["--images", "100"], "--images is 100"),
        ("data.loading", ["--train_file", "nowhere.jsonl"], "--train_file is nowhere.jsonl; there is no such file"),
        ("loss", ["--pairs", "1"], "--pairs is '1'"),
        ("processes.gradients", ["--processes", "0"], "--processes is '0'; write numbers above 0"),
        ("processes.gradients", ["--processes", "x"], "--processes is 'x'; write numbers above 0"),
        ("processes.gradients", ["--processes", "2,,3"], "--processes is '2,,3'; write numbers above 0"),
        ("processes.gradients", ["--processes", "1,-2"], "--processes is '1,-2'; write numbers above 0"),
        ("processes.gradients", ["--processes", "5"], "--pairs is 24; give a multiple of 10, 20 or more"),
        ("processes.gradients", ["--processes", "2", "--pairs", "4"], "--pairs is 4; give a multiple of 4, 8 or more"),
        ("processes.gradients", ["--embedding_dim", "1"], "--embedding_dim is 1; give 2 or more"),
        ("processes.gradients", ["--process", "1"], "Did you mean '--processes'?"),
    ],
)
def test_bad_flags(name: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
