"""What the README says works: its commands name scripts and flags that exist, its objective trains."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from mm_utils.models import ModelArguments, build_model
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.wordpiece import train_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCSTRINGS = "\n".join(path.read_text(encoding="utf-8").split('"""')[1] for path in (ROOT / "scripts").glob("*.py"))
COMMAND = re.compile(
    r"(?:accelerate launch (?:--config_file \S+ )?|python )(scripts/\S+\.py)((?:[^\n`]*\\\n)*[^\n`]*)"
)


def help_of(script: str, capsys: pytest.CaptureFixture) -> str:
    module = __import__(f"scripts.{Path(script).stem}", fromlist=["main"])
    with pytest.raises(SystemExit):
        module.main(["--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("text", [README, DOCSTRINGS], ids=["README", "docstrings"])
def test_commands_name_scripts_and_flags_that_exist(text, capsys):
    found = COMMAND.findall(text)
    assert found
    for script, rest in found:
        assert (ROOT / script).is_file(), script
        known = help_of(script, capsys)
        for flag in re.findall(r"--\w+", rest):
            assert flag in known, f"{script} has no {flag}"


def test_files_that_the_readme_names_exist():
    names = re.findall(r"`((?:scripts|accelerate_configs|docs|recipes)/[\w./-]*)`", README)
    names += re.findall(r"\]\((docs/[^)]+)\)", README)
    assert names
    for name in names:
        file, _, heading = name.partition("#")
        assert (ROOT / file).exists(), name
        assert (
            not heading or f"## {heading.replace('-', ' ')}\n" in (ROOT / file).read_text(encoding="utf-8").lower()
        ), name


def test_the_readmes_term_trains(tmp_path, monkeypatch):
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "EmbeddingTerm" in block)
    assert len(code.strip().splitlines()) <= 20
    (tmp_path / "my_terms.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    [objectives] = re.findall(r"--objectives (\S+my_terms\S+)", README)
    tokenizer = train_tokenizer(["a b"], 50)
    model = build_model(ModelArguments(image_size=32), tokenizer)
    objective = build_objective(model, ObjectiveArguments(objectives), 0, tokenizer)
    batch = {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "input_ids": torch.randint(5, 7, (4, 8)),
        "attention_mask": torch.ones(4, 8, dtype=torch.long),
        "ids": torch.arange(8).view(4, 2),
    }
    report = objective(batch, 0)
    report["loss"].backward()
    assert torch.isfinite(report["Uniformity_loss"])
    assert objective.model.visual_projection.weight.grad.abs().sum() > 0


def test_install_commands_name_the_requirements_file():
    for line in re.findall(r"pip install -r (\S+)", README):
        assert (ROOT / line.strip("`:;,.")).is_file() or shlex.split(line)[0] == "requirements.txt"
