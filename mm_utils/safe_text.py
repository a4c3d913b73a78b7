"""Text that may be published or shown: secrets out of it, and nothing in it that a terminal or a spreadsheet obeys."""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

_SECRET_NAME = (
    r"[\w-]*?(?<![a-z])(?:token|secret|password|passwd|signature|credential|(?:api|access)[_-]?key)(?![a-z])[\w-]*"
)
_VALUE = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|\S)+"""
_REDACTIONS = [
    (re.compile(pattern, re.IGNORECASE | re.MULTILINE), replacement)
    for pattern, replacement in (
        # '--password=two words', as shlex.join quotes a whole word; a quote inside is '"'"'
        (rf"""'(--?{_SECRET_NAME}=)(?:'"'"'|[^'])*'""", r"'\1***'"),
        # --hub_token VALUE, also over a line continued with a backslash; not --use_token --next_flag
        (rf"(?<![\w-])(--?{_SECRET_NAME}(?:=|(?:\s|\\\n)+))(?!--){_VALUE}", r"\1***"),
        # YAML: hub_token: VALUE WITH SPACES
        (rf"^([ \t]*{_SECRET_NAME}:[ \t]+)\S.*$", r"\1***"),
        # WANDB_API_KEY=VALUE and "token": "VALUE"
        (rf"""(?<![\w-])(["']?{_SECRET_NAME}["']?[ \t]*[:=][ \t]*){_VALUE}""", r"\1***"),
        (r"([?&](?:sig|key)=)[^&\s]+", r"\1***"),
        (r"(bearer\s+)\S+", r"\1***"),
        # https://user:password@host, and https:/user:password@host, which pathlib makes of it
        (r"(:/{1,2})[^\s/]*@", r"\1***@"),
        (r"(?<![a-z0-9])hf_(?:(?:oauth|jwt|app)_[\w.-]+|[a-z0-9]{10,})", "***"),
    )
]
# One of these is in everything that a redaction finds; most messages have none.
_SUSPICIOUS = re.compile("token|secret|passw|key|signature|credential|sig=|bearer|hf_|@", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)$", re.IGNORECASE)
# All but line feed and tab that moves the cursor, changes the direction of writing or cannot be encoded.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def redact(text: str) -> str:
    """Replace by ``***`` whatever looks like a secret, so that `text` can be published.

    Covered: Hub tokens, values of flags, variables and YAML or JSON keys named after a token, secret, password or API
    key, credentials and signatures in URLs, bearer headers, and the values that such environment variables have now.
    """
    for name in filter(_SECRET_VARIABLE.search, list(os.environ)):
        value = os.environ.get(name, "").strip()
        if len(value) >= 8:
            text = text.replace(value, "***")
    if _SUSPICIOUS.search(text):
        for pattern, replacement in _REDACTIONS:
            text = pattern.sub(replacement, text)
    return text


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they may be published: `redact` in every text, and no value whose name says that it is secret."""
    return {
        name: "***" if value is not None and redact(f"{name}=x") != f"{name}=x" else _redact_inside(value)
        for name, value in values.items()
    }


def _redact_inside(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_redact_inside(each) for each in value)
    return value


def printable(text: str) -> str:
    r"""`text` with its control characters spelled out, such as ``\x1b``; line feeds and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class SafeFormatter(logging.Formatter):
    """Messages and tracebacks without secrets and control characters.

    Lines after the first are indented: a file name or a caption with a line feed cannot look like a message of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One record as it is shown."""
        return printable(redact(super().format(record))).replace("\n", "\n  ")


def one_line(error: BaseException, limit: int = 300) -> str:
    """What an error says, on one line without secrets, without a full stop at its end."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return printable(redact(" ".join(f"{type(error).__name__}: {error}".split())))[:limit].rstrip(".")


def no_formula(value: Any) -> Any:
    """A cell of a CSV file that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@") else value
