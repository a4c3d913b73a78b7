"""Where a name leads: to a folder or file of this machine, or to a repository of the Hub; it imports no library."""

import difflib
import logging
import os
import re
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_NOT_A_PATH = re.compile(r".*://|(pipe|data|st):|.*[*?\[{]")  # addresses, and patterns of many files
_OF_DATA = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".tar", ".zip", ".db", ".sqlite")


def missing(name: str, is_local: bool = False) -> str:
    """Return the fault of a name that leads nowhere, for a message; empty if it may be right.

    It may be a path or, unless `is_local`, a Hub id: a name without a slash, or owner/name where there is no folder owner.
    """
    path = Path(name).expanduser()
    if not name or os.path.lexists(path) or (_NOT_A_PATH.match(name) and not is_local):
        return ""
    owner, *rest = name.split("/")
    is_id = not rest or (len(rest) == 1 and rest[0] != "" and not os.path.isdir(owner))
    if is_id and not is_local and name[0] not in "./~" and not name.lower().endswith(_OF_DATA):
        return ""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    kind = "file" if path.suffix[1:2].isalpha() else "folder"  # of v1.0, a folder
    return f"there is no such {kind}. {f'Did you mean {path.parent / close[0]}?' if close else 'Check the path.'}"


@cache
def use_cache_without_network() -> None:
    """Ask the Hub once, for at most five seconds; if it does not answer, work as with HF_HUB_OFFLINE=1.

    Otherwise its libraries ask six times for every file, for a minute and a half, and print each attempt twice.
    """
    import datasets.config
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)
    except Exception as error:  # of whatever library the Hub's client uses
        logger.warning("%s does not answer (%s); only its cache on this machine is used", constants.ENDPOINT, error)
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # of the processes that this one starts
