"""A path that leads nowhere is named in one line before any library is loaded; a Hub id is not taken for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mm_utils.places import check_words, missing, use_cache_without_network

SCRIPTS = Path(__file__).parents[1] / "scripts"


MISSING = {
    "": ["data/mine", "owner/name", "owner/name-v1.5", "bert-base-uncased", "s3://bucket/no/such"],
    "Check the path.": ["data/typo", "./mine", "../mine", "/no/such", "~/no/such", "a/b/c", "owner/", "typo.jsonl"],
    "Did you mean data/mine?": ["data/mime"],
}


@pytest.mark.parametrize(("remedy", "name"), [(remedy, name) for remedy, names in MISSING.items() for name in names])
def test_only_what_can_be_a_hub_id_may_be_missing(
    remedy: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/data/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # above which nothing else lies
    assert missing(name) == (remedy and f"there is no such folder. {remedy}")
    assert missing("photos", "file", on_hub=False) == "there is no such file. Check the path."
    assert missing("web-{000..009}.tar", "file", on_hub=False) == ""
    check_words("search.py", ["--index_dir", "data", "a dog on a beach"])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("pretrain", ["--dataset_name", "data/typo"]),
        ("pretrain", ["--train_file", "typo.csv"]),
        ("prepare_data", ["--output_dir", "new", "--sources", "data", "typo/pairs/a.csv,weight=3"]),
        ("embed", ["--model_name_or_path", "owner/name", "--images", "typo", "--index_dir", "new"]),
        ("search", ["--index_dir", "typo", "a fox"]),
    ],
)
def test_a_script_looks_before_it_loads_libraries(script: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for library in ("torch", "transformers", "datasets"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit('a library was loaded')")
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *words]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "; there is no such f" in ended.stderr


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
