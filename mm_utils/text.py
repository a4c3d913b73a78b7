"""Remove secrets from text, and signs that a terminal, Markdown or a spreadsheet obeys."""

import hashlib
import html
import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

# Quantifiers before something else are bounded: the text may come from a data file, and the search stays linear in it.
_SECRET_NAME = (
    r"[\w-]{0,100}?(?:(?<![a-z])(?:token|secret|password|passwd|passphrase|signature|credential|"
    r"(?:api|access|account|private|shared[ _-]?access)[ _-]?key)(?![a-z])[\w-]{0,100}"
    r"|[_-](?:key|pat|pw|pwd|pass)(?![\w-]))"
)
_VALUE = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|\S)+"""
# What stands in the first group stays.
_REDACTIONS = [
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        # '--password=two words', as shlex.join quotes a whole word; a quote inside is '"'"'
        rf"""('--?{_SECRET_NAME}=)(?:'"'"'|[^'])*(?=')""",
        # --hub_token VALUE, also over a line continued with a backslash; not --use_token --next_flag
        rf"(?<![\w-])(--?{_SECRET_NAME}(?:=|(?:\s|\\\n){{1,100}}))(?!--){_VALUE}",
        # YAML: hub_token: VALUE WITH SPACES
        rf"^([ \t]{{0,100}}{_SECRET_NAME}:[ \t]{{1,100}})\S.*$",
        # Authorization: Basic VALUE
        r"""(authorization["']?[ \t]{0,9}[:=][ \t]{0,9}["']?)[^\r\n"']+""",
        r"(bearer\s{1,9})\S+",
        # WANDB_API_KEY=VALUE and "token": "VALUE"
        rf"""(?<![\w-])(["']?{_SECRET_NAME}["']?[ \t]{{0,9}}[:=][ \t]{{0,9}}){_VALUE}""",
        r"([?&](?:sig|key)=)[^&\s]+",
        # https://user:password@host, and https:/user:password@host, which pathlib makes of it
        r"(:/{1,2})[^\s/]*(?=@)",
        # user:password@host without a scheme
        r"(?<![\w.+:@/-])([\w.+-]{1,64}:)[^\s@/]{1,128}(?=@[a-z0-9])",
        # tokens of the Hub, GitHub, OpenAI and Anthropic, AWS, Google
        r"()(?<![a-z0-9])(?:hf_(?:(?:oauth|jwt|app)_[\w.-]+|[a-z0-9]{10,})|api_org_\w{16,}|gh[pousr]_[a-z0-9]{16,}|"
        r"github_pat_\w{16,}|sk-[\w-]{16,}|(?-i:AKIA|ASIA)[A-Z0-9]{12,}|(?-i:AIza)[\w-]{30,})",
    )
]
# Every secret that a redaction finds has one of these beside it; most messages have none, and cost one search.
_SUSPICIOUS = re.compile(
    "token|secret|pass|key|signature|credential|sig=|bearer|authorization|@|hf_|[_-]p(?:at|wd?)|gh[pousr]_|sk-|a[ks]ia|aiza|api_org",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY)$|_(?:KEY|PAT|PW|PWD|PASS)$", re.IGNORECASE
)
# The folders of an absolute path, at least one; not what follows in an address, such as https://host/a/b.
_ABSOLUTE = re.compile(r"(?<![\w:/.~…*-])(?:file://)?/(?:[^\s/:;,\"'`<>|()\[\]{}]{1,255}/)+(?=[^\s/\"'`])")
_CLONE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROJECT = tuple(os.path.join(os.path.realpath(_CLONE), name, "") for name in ("mm_utils", "scripts"))
_ENTRY = os.path.join("mm_utils", "run", "script.py")  # calls what starts the program
_LIBRARIES = re.compile(rf"<|{re.escape(sysconfig.get_path('stdlib'))}|.*(site|dist)-packages")
_LONGEST_LINE = 4000  # characters of a logged line, whatever a message quotes
# Characters that move the cursor, change the direction of writing or cannot be encoded; not line feed and tab.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def redact(text: str) -> str:
    """Replace everything that looks like a secret by ``***``, so that `text` can be published.

    Covered are tokens of the Hub and of a few large services; values of flags, variables and keys named after a secret, credentials in
    URLs and headers, and the current values of such environment variables. The time is linear in the length of `text`.
    """
    for name in filter(_SECRET_VARIABLE.search, list(os.environ)):
        value = os.environ.get(name, "").strip()
        if len(value) >= 8:  # shorter ones may be words of any text
            text = text.replace(value, "***")
    if _SUSPICIOUS.search(text):
        for pattern in _REDACTIONS:
            text = pattern.sub(r"\1***", text)
    return text


def without_secrets(values: Mapping[str, Any], clean: Callable[[str], str] = redact) -> dict[str, Any]:
    """Clean every text in a mapping, nested ones too, and hide each value whose name says that it is a secret."""
    cleaned = {}
    for name, value in values.items():
        is_text = value is not None and not isinstance(value, (int, float, Mapping))
        # 'hub_token=x' becomes 'hub_token=***', and 'rows=x' stays
        is_secret = is_text and redact(f"{name}=x") != f"{name}=x"
        cleaned[name] = "***" if is_secret else _clean_inside(value, clean)
    return cleaned


def _clean_inside(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return without_secrets(value, clean)
    if isinstance(value, (list, tuple)):
        return type(value)(_clean_inside(each, clean) for each in value)
    return value


def publishable(text: str) -> str:
    """Redact a text, and name files of this machine without the folders that they are in.

    Paths in the current folder, and scripts of this project, become relative. Lone surrogates, such as bytes of old file names, are escaped.
    """
    text = redact(text.encode("utf-8", "backslashreplace").decode())
    for known, shown in ((os.getcwd(), ""), (_CLONE, ""), (os.path.expanduser("~"), "~/")):
        if known.count("/") > 1 or known == "/root":  # '/tmp' stands in many paths
            text = text.replace(f"{known}/", shown)
    return _ABSOLUTE.sub("…/", text)


def printable(text: str) -> str:
    r"""Spell out control characters, such as ``\x1b``; line feeds and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, limit: int = 80) -> str:
    """Cut a name from a data file to at most `limit` characters, for a message.

    Secrets are redacted before: of half a secret none would be recognised.
    """
    if len(text) > limit:
        text = redact(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class SafeFormatter(logging.Formatter):
    """Format log records without secrets and control characters, lines cut to 4,000 characters.

    Lines after the first are indented, so that a file name or caption with a line feed cannot imitate another message.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        lines = printable(redact(super().format(record))).split("\n")
        return "\n  ".join(shortened(line, _LONGEST_LINE) for line in lines)


def one_line(error: BaseException, limit: int = 300) -> str:
    """Format an error as one line of at most `limit` characters without secrets."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    text = printable(redact(" ".join(f"{type(error).__name__}: {error}".split())))
    return shortened(text, limit).rstrip(".")


def own_name(found: Any) -> str:
    """Return how a user would name a function, or the class of something, as module.name."""
    named = found if isinstance(found, FunctionType) else type(found)
    return f"{named.__module__}.{named.__qualname__}"


def passes_own_code(error: BaseException) -> bool:
    """Return whether an error comes through a user's code, which this project has called: a term, callback, evaluator, reader."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    files += re.findall(r'^  File "(.+)", line', str(error), re.MULTILINE)  # those of a data worker
    is_called = False
    for file in files:
        if os.path.realpath(file).startswith(_PROJECT):
            is_called |= not file.endswith(_ENTRY)
        elif is_called and not _LIBRARIES.match(file):
            return True
    return False


def no_formula(value: Any) -> Any:
    """Quote a cell of a CSV file that a spreadsheet would run as a formula."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@") else value


def sentence_case(text: str) -> str:
    """Return a sentence with a capital in front."""
    return text[0].upper() + text[1:]


def byte_size(number: float) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def markdown_text(value: object, limit: int = 300) -> str:
    """Format a value as one line, cut to `limit` characters, that Markdown shows literally."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)).split())
    text = html.escape(shortened(text, limit), quote=False)
    # An underscore inside a word is not markup, and names stay readable without a backslash.
    text = re.sub(r"([\\`*\[\]|~#$])|(?<![^\W_])_|_(?![^\W_])", lambda found: "\\" + found[0], text)
    # GitHub turns bare addresses into links.
    return re.sub(r"(?<=[a-z]):(?=//)|(?<=www)\.", lambda found: "\\" + found[0], text, flags=re.IGNORECASE)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a Markdown table; floats get three significant digits, None becomes an empty cell.

    Cells may hold Markdown: pass foreign text through `markdown_text` first.
    """
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        cells = ["" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def duration(hours: float) -> str:
    """Return a time in its largest unit: `3.2 days`, `2.0 h`, `5.1 min` or `7.0 s`."""
    for unit, size in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        # '47.0 h', and from 48 on '2.0 days'
        if hours >= 2 * size:
            return f"{hours / size:.1f} {unit}"
    return f"{3600 * hours:.1f} s"


def image_key(image_id: str) -> int:
    """Return a hash of 63 bits, the same for the same id."""
    # int64 has a sign
    return int.from_bytes(hashlib.blake2b(image_id.encode(), digest_size=8).digest(), "big") >> 1


def caption_key(caption: str) -> int:
    """Return a hash of 63 bits, the same for captions that differ only in case and spacing."""
    return image_key(" ".join(caption.lower().split()))
