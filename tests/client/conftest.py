"""A scripted coordinator, and the command line run in this process against it."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from leasehold_client import main
from leasehold_client.aio import retry as async_retry
from leasehold_client.coordinator import retry

from .scripted_coordinator import ScriptedCoordinator, serving


@dataclass(frozen=True, slots=True)
class Done:
    """How a command line ended."""

    code: int
    stdout: str
    stderr: str


CommandLine = Callable[..., Done]


@pytest.fixture
def scripted() -> Iterator[ScriptedCoordinator]:
    """A coordinator that plays the test's script."""
    with serving() as started:
        yield started


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps the settings of whoever runs the tests away."""
    monkeypatch.delenv("LEASEHOLD_COORDINATOR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def bare_leasehold(
    no_settings: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """Runs ``leasehold ARGUMENTS…`` without settings."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["leasehold", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        output = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, output.out, output.err)

    return run


@pytest.fixture
def leasehold(
    bare_leasehold: CommandLine, monkeypatch: pytest.MonkeyPatch, scripted: ScriptedCoordinator
) -> CommandLine:
    """Runs ``leasehold ARGUMENTS…`` against the scripted coordinator."""
    monkeypatch.setenv("LEASEHOLD_COORDINATOR", scripted.address)
    return bare_leasehold


@pytest.fixture
def short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits 30 s for a coordinator."""
    for module in (retry, async_retry):
        monkeypatch.setattr(module, "OUTAGE_LIMIT_S", 0.8)
        monkeypatch.setattr(module, "REPEAT_LIMIT_S", 0.8)
        monkeypatch.setattr(module, "RETRY_INTERVAL_S", 0.01)
