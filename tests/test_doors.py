"""An extra can be deleted: runs that do not ask for it go on, those that do are refused in a sentence."""

import pytest

from mm_utils import doors
from mm_utils.arguments import parse_args
from mm_utils.run import flags
from mm_utils.run.doors import Doors
from tests.kit.commands import ROOT

EXTRAS = sorted(path.parent.name for path in (ROOT / "mm_utils/extras").glob("*/door.py"))


def delete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tuple(door for door in doors._doors() if door.__name__.split(".")[-2] != name)
    assert len(left) == len(EXTRAS) - 1
    monkeypatch.setattr(doors, "_doors", lambda: left)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_run_without_an_extra_has_its_flags_and_callbacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    delete(name, monkeypatch)
    for script in ("pretrain", "finetune"):
        attached = Doors(script)
        given = parse_args(*flags.PRETRAINING, *attached.arguments, argv=[], doc=None)
        flags.check_flags(given)
        attached.open(given)
        assert all(f".extras.{name}." not in type(each).__module__ for each in attached.callbacks)


@pytest.mark.parametrize(
    ("extra", "kind", "name"),
    [
        ("micro_batch", "MICRO_BATCHES", "auto"),
    ],
)
def test_what_asks_for_a_deleted_extra_is_refused(extra: str, kind: str, name: str, monkeypatch) -> None:
    assert callable(doors.entry(kind, name, "--flag is set"))
    delete(extra, monkeypatch)
    with pytest.raises(ValueError, match=rf"^--flag is set; no folder of .* has {name} among its {kind}\. Restore"):
        doors.entry(kind, name, "--flag is set")
