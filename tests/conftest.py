"""What holds for every test, and for the processes that tests start."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests import environment, prefork

# Hundreds of our processes are started: compiling our modules anew in each would take most of their starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LONG_LIMIT_S: Final = 900

_folder = pytest.StashKey[Path]()
_left = pytest.StashKey[list[str]]()
_failed = pytest.StashKey[bool]()


@pytest.fixture
def executed() -> Iterator[None]:
    """Starts what the test starts as users start it, not by forking a process that has imported packages."""
    with prefork.executed():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Sets up the environment, which the processes of pytest-xdist inherit."""
    if not hasattr(config, "workerinput"):
        folder = environment.set_up(gpus=environment.selects_gpus(config.option.markexpr))
        config.stash[_folder] = folder
        config.option.basetemp = str(folder / "p")  # short, because the names of sockets are bounded


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases that a sample lacks, and begins with what takes minutes."""
    if config.option.markexpr == "long" and not any("::" in argument for argument in config.args):
        left_out = {item for item in items if _is_long_case(item) and not environment.is_sampled(item.nodeid)}
        config.hook.pytest_deselected(items=list(left_out))
        played = [item for item in items if item.get_closest_marker("long") and item not in left_out]
        first = [item for item in played if item.get_closest_marker("minutes")]
        others = [item for item in played if item not in first]
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        short = [item for item in items if not item.get_closest_marker("long")]
        items[:] = [*environment.begin_with(first, others, workers), *short]
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_S))


def _is_long_case(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.get_closest_marker("long") is not None


def pytest_report_header() -> str:
    """Names the seed, with which the same samples are played again."""
    return f"{environment.SEED}={environment.seed()}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that leaves a process or a file behind."""
    prefork.stop()
    if _folder not in session.config.stash:
        return
    left = environment.leftovers(session.config.stash[_folder])
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.config.stash[_left] = left
    session.config.stash[_failed] = bool(session.exitstatus)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what was left behind, and where the files of failed tests are."""
    for line in config.stash.get(_left, []):
        terminalreporter.write_line(f"left behind: {line}", red=True)
    if config.stash.get(_failed, False):
        terminalreporter.write_line(f"files of this run: {config.stash[_folder]}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the files of a run that went well."""
    if _folder in config.stash and not config.stash.get(_failed, False):
        environment.tear_down(config.stash[_folder])
