"""Counts the faults that these tests inject and what came of each; the table stands at the end of the session.

A test says what it does to the program with the fixture `fault`, before it looks at the outcome:

    def test_a_cut_image_is_set_aside(fault, prepared):
        fault("images", "a JPEG cut in half")
        assert ...

What is known only later is set on what `fault` returns, e.g. `injected.detection_seconds = 1.5`; `with fault(...):` does
the same and shows what belongs to it. A fault is survived if its test passes, its teardown included. A test that fails
before it named a fault counts as one that was not survived, in the area that its module is named after.
"""

import statistics
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from tests.data.prepare.fault_corpus import Corpus

COLUMNS = (
    "area",
    "injected",
    "survived",
    "steps lost (most)",
    "save interval",
    "acknowledged bytes lost",
    "detection seconds (median, most)",
    "silent corruptions",
)
_LEFT_OUT = pytest.StashKey[int]()


@dataclass
class Injected:
    """One fault.

    Attributes:
        area: what it struck: a row of the table.
        what: what was done, in a few words.
        steps_lost: steps of training that had to be done again.
        save_interval: steps between two checkpoints of that run: the most that may be lost.
        bytes_lost: of what the program had said was saved.
        detection_seconds: from the fault to the message that names it.
        silent_corruptions: wrong results that nothing spoke of.
    """

    area: str
    what: str
    steps_lost: int | None = None
    save_interval: int | None = None
    bytes_lost: int | None = None
    detection_seconds: float | None = None
    silent_corruptions: int = 0

    def __enter__(self) -> "Injected":
        return self

    def __exit__(self, *_: object) -> None:
        """What was raised inside fails the test, and so the fault is not survived."""


@dataclass
class Outcome:
    """A fault, and whether its test held."""

    injected: Injected
    survived: bool


Record = Callable[..., Injected]


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Record:
    """`fault(area, what, **figures)` counts a fault as injected; the figures are the fields of `Injected`."""

    def record(area: str, what: str, **figures: float) -> Injected:
        injected = Injected(area, what, **figures)  # type: ignore[arg-type]
        request.node.user_properties.append(("fault", injected))
        return injected

    return record


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> "Corpus":
    """Sources of every format, full of faults, and what must become of each row."""
    from tests.data.prepare.fault_sources import build  # datasets and torch take seconds, and few modules need them

    return build(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def prepared(zoo: "Corpus") -> Path:
    """What `prepare_data` makes of the zoo."""
    from scripts.prepare_data import main

    output = zoo.folder / "prepared"
    flags = ("--num_proc", "2", "--max_bad_fraction", "1", "--on_leakage", "drop", "--near_duplicates", "drop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", zoo.folder / "cache")
        # No address of the zoo gets as far as a connection.
        main(["--sources", *zoo.sources, "--output_dir", str(output), "--allow_download", *flags])
    return output


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, on one process, of what does not depend on their number."""
    from tests.faults.rank_runs import start
    from tests.kit.tiny_run import exact_run

    folder = tmp_path_factory.mktemp("exact") / "run"
    assert start(1, exact_run(folder)).statuses == [0]
    return folder


# -- pytest's hooks -----------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults_report", metavar="FILE", help="Write the table of injected faults, as Markdown.")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("faults")


def leave_long_tests_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out unless `-m` or the name of a test asks for them; called by `tests/conftest.py`."""
    if config.option.markexpr or any("::" in arg for arg in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.stash[_LEFT_OUT] = len(slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put into the report plain values, which other processes and JUnit's XML can hold."""
    report = yield
    report.user_properties = [
        (name, asdict(value) if isinstance(value, Injected) else value) for name, value in report.user_properties
    ]
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Also called by `tests/conftest.py`, as a process that leaves the tests to others never comes by this folder."""
    if not config.pluginmanager.has_plugin("table of faults"):
        config.pluginmanager.register(_Summary(config), "table of faults")


class _Summary:
    """Listens to all reports of tests in this folder, those of other processes included, and prints the table."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "faults" in report.keywords:
            self.reports.setdefault(report.nodeid, []).append(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = outcomes(self.reports)
        if not found:
            return
        rows = table(found)
        terminalreporter.section("faults")
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        for cells in rows:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            terminalreporter.write_line("  ".join(padded).rstrip())
        for each in found:
            if not each.survived:
                terminalreporter.write_line(f"not survived: {each.injected.area}: {each.injected.what}")
        left_out = self.config.stash.get(_LEFT_OUT, 0)
        if left_out:
            terminalreporter.write_line(f"{left_out} long tests left out; -m slow runs them")
        path = self.config.getoption("faults_report", default=None)
        if path:
            Path(path).write_text(markdown(rows), encoding="utf-8")


# -- the table ----------------------------------------------------------------------------------------------------------


def outcomes(reports: dict[str, list[pytest.TestReport]]) -> list[Outcome]:
    """What became of every fault; `reports` are those of each test's setup, call and teardown."""
    found = []
    for name, phases in reports.items():
        if any(phase.skipped and not hasattr(phase, "wasxfail") for phase in phases):
            continue
        held = all(phase.passed for phase in phases)
        given = [value for key, value in phases[-1].user_properties if key == "fault"]
        injected = [Injected(**cast(dict[str, Any], value)) for value in given]
        if not (injected or held):
            module, _, test = name.partition("::")
            injected = [Injected(Path(module).stem.removeprefix("test_"), test)]
        found += [Outcome(each, held) for each in injected]
    return found


def table(found: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """The cells of a line per area, below the names of the columns and above the total."""
    areas: dict[str, list[Outcome]] = {}
    for each in found:
        areas.setdefault(each.injected.area, []).append(each)
    every = [each for group in areas.values() for each in group]
    return [COLUMNS, *(_cells(area, areas[area]) for area in sorted(areas)), _cells("total", every)]


def markdown(rows: list[tuple[str, ...]]) -> str:
    """The table as Markdown."""
    lines = [" | ".join(cells) for cells in (rows[0], ("---",) * len(rows[0]), *rows[1:])]
    return "".join(f"| {line} |\n" for line in lines)


def _cells(area: str, found: list[Outcome]) -> tuple[str, ...]:
    steps = [each.injected.steps_lost for each in found if each.injected.steps_lost is not None]
    intervals = [each.injected.save_interval for each in found if each.injected.save_interval is not None]
    lost = [each.injected.bytes_lost for each in found if each.injected.bytes_lost is not None]
    seconds = [each.injected.detection_seconds for each in found if each.injected.detection_seconds is not None]
    return (
        area,
        f"{len(found):,}",
        f"{sum(each.survived for each in found):,}",
        str(max(steps)) if steps else "",
        str(max(intervals)) if intervals else "",
        f"{sum(lost):,}" if lost else "",
        f"{statistics.median(seconds):.2g}, {max(seconds):.2g}" if seconds else "",
        str(sum(each.injected.silent_corruptions for each in found)),
    )
