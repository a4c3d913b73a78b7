"""A path that leads nowhere is named; a Hub id is not taken for one."""

import subprocess
import sys
from pathlib import Path

import pytest

from mm_utils.places import missing, use_cache_without_network

MISSING = {
    "": ["data/mine", "owner/name", "owner/name-v1.5", "bert-base-uncased", "s3://bucket/no/such", "web-{000..9}.tar"],
    "Check the path.": ["data/typo", "./mine", "../mine", "/no/such", "~/no/such", "a/b/c", "owner/", "typo.jsonl"],
    "Did you mean data/mine?": ["data/mime"],
}


@pytest.mark.parametrize(("remedy", "name"), [(remedy, name) for remedy, names in MISSING.items() for name in names])
def test_only_what_can_be_a_hub_id_may_be_missing(
    remedy: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/data/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # above which nothing else lies
    found = missing(name)
    assert bool(found) == bool(remedy)
    assert found.endswith(remedy)


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("pretrain", "--dataset_name ./typo", "--dataset_name is ./typo; there is no such folder. Check the path."),
        ("finetune", "--train-file=typo.csv", "--train_file is typo.csv; there is no such file. Check the path."),
        (
            "prepare_data",
            "--sources a/b/c.csv,image_root=d",
            "--sources is a/b/c.csv,image_root=d; there is no such file.",
        ),
        ("search", "--index_dir typo words", "--index_dir is typo; there is no such folder."),
        ("export", "--model_name_or_path ./x", "--model_name_or_path is ./x; there is no such folder."),
    ],
)
def test_a_script_names_it_before_it_loads_libraries(script: str, words: str, said: str, tmp_path: Path) -> None:
    code = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['{script}.py', *{words.split()!r}]"
    path = Path(__file__).parents[1] / f"scripts/{script}.py"
    command = [sys.executable, "-c", f"{code}; runpy.run_path({str(path)!r}, run_name='__main__')"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{script}.py: error: {said}")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Silent:
        def head(self, address: str, timeout: float) -> None:
            asked.append(address)
            raise ConnectionError("no network")

    import datasets.config
    from huggingface_hub import constants

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.utils.get_session", Silent)
    use_cache_without_network.cache_clear()
    use_cache_without_network()
    use_cache_without_network()
    assert asked == [constants.ENDPOINT]
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE
    use_cache_without_network.cache_clear()
