"""The repository is written in plain sentences with the field's words: a phrase of this table has a better word."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERB = r"(?:is|are|was|were|be|been)"
PHRASES = {  # a pattern -> the better words
    r'"""(?:Give|Say|Tell|Of)\b': "Return, Yield",
    r"\bgives\b|\bgave\b": "returns, yields, has, sets",
    r"\bso many\b": "n",
    r"\b(?:has|have) not(?=[,.;:)]| a | an | the )": "does not have",
    r"\bare there\b(?!\?)|\b(?:that|which|what) is there\b": "exist, are left, free",
    r"\bresting\b|\b(?:towers?|encoders?|they|it|that|which) rests?\b": "is frozen for this step",
    r"\bdear(?:er)?\b": "slow, expensive",
    rf"\b{VERB} said\b|\bsaid once\b": "stated, logged",
    rf"\b{VERB} told\b": "stated, passed",
    r"\bdealt (?:to|by|together)\b|\bdeals\b|\bdealing\b": "assigned",
    r"\bhears\b": "receives, reads",
    r"\bcontent with\b": "satisfied by",
    rf"(?<![Tt]here )(?<!may )(?<!would )(?<!must )\b{VERB} no (?!longer\b|more\b|less\b|one\b|better\b|worse\b|wider\b|longer\b|other\b|way\b|\W)": "is not a",
}
FILES = [
    Path(name)
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    if name.endswith((".md", ".html", ".ipynb", ".yaml", ".py")) and name != "tests/test_language.py"
]


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_with_a_better_word_is_not_written(phrase: str) -> None:
    pattern = re.compile(phrase)
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path in FILES
        if (ROOT / path).is_file()
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"Write {PHRASES[phrase]} instead:\n" + "\n".join(found)
