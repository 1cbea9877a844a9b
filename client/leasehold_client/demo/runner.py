"""``leasehold demo``: real processes suspended, moved and restored on simulated GPUs."""

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from leasehold_client.cli.exit_codes import EXIT_FAILED, fail, interrupted
from leasehold_client.coordinator.client import Client
from leasehold_client.demo.fleet import DemoError, DemoFleet, demo_fleet
from leasehold_client.demo.scenario import Story
from leasehold_client.demo.screen import DemoScreen
from leasehold_client.errors import LeaseholdError, UsageError

COUNTERS: Final = (
    Path(__file__).with_name("counter.py"),
    Path(__file__).resolve().parents[3] / "examples/counter.py",
)
"""Where the program that counts is: in an installed wheel, and in a checkout."""

TIME_LIMIT_S: Final = 45.0
"""For all but the end, which takes 15 s at the very worst."""


def run(folder: Path | None, counter: Path | None, *, keep: bool) -> None:
    """Plays the demonstration, and exits with 1 unless no count was lost and no byte is wrong.

    Args:
        folder: Folder for stores and logs, which is kept. None: a temporary one.
        counter: The program that counts. None: Leasehold's own.
        keep: Leave the fleet running at the end, until Ctrl-C.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        program = _find_counter(counter)
        with _folder(folder) as chosen:
            whole = _perform(chosen, program, keep=keep)
    except KeyboardInterrupt:
        interrupted("every process of the demonstration has ended")
    except LeaseholdError as error:
        fail(error)
    sys.exit(0 if whole else EXIT_FAILED)


def _perform(folder: Path, program: Path, *, keep: bool) -> bool:
    """Plays the demonstration from start to end. Returns whether no count was lost and no byte wrong."""
    with _time_limit(TIME_LIMIT_S), demo_fleet(folder) as fleet, Client(fleet.address) as client:
        summary = Story(fleet, client, DemoScreen(), program).tell()
        click.echo(json.dumps(summary))
        signal.setitimer(signal.ITIMER_REAL, 0)
        if keep:
            _wait_for_interrupt(fleet)
    return summary["lost"] == summary["corrupt"] == 0


def _find_counter(wanted: Path | None) -> Path:
    for program in COUNTERS if wanted is None else (wanted,):
        if program.is_file():
            return program.resolve()
    raise UsageError(f"{COUNTERS[0]} is missing: install Leasehold again, or name a program with --counter")


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="leasehold-demo-") as made:
            yield Path(made)
    else:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the folder {wanted} can't be used: {error.strerror}; choose another"
            ) from error
        yield wanted.resolve()


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Ends what takes longer, wherever it waits."""

    def end(signal_number: int, frame: object) -> None:
        raise DemoError(f"the demonstration took longer than {limit_s:g} s")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _wait_for_interrupt(fleet: DemoFleet) -> None:
    """Returns when somebody presses Ctrl-C: that is how a kept demonstration ends well."""
    click.echo(
        f"It runs on. Talk to it with LEASEHOLD_COORDINATOR={fleet.address} leasehold get workloads; "
        "Ctrl-C ends it.",
        err=True,
    )
    ended = threading.Event()
    try:
        while not ended.wait(0.5):
            fleet.check()
    except KeyboardInterrupt:
        return


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
