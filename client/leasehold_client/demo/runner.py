"""``leasehold demo``: real processes suspended, moved and restored on simulated GPUs."""

import fcntl
import json
import os
import shlex
import shutil
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
from leasehold_client.demo.fleet import FOLDER_MARK, DemoError, DemoFleet, demo_fleet
from leasehold_client.demo.scenario import Scenario
from leasehold_client.demo.screen import DemoScreen
from leasehold_client.display import standard_output
from leasehold_client.errors import LeaseholdError, UsageError

COUNTERS: Final = (
    Path(__file__).with_name("counter.py"),
    Path(__file__).resolve().parents[3] / "examples/counter.py",
)
"""Places of the counting program: in an installed wheel, and in a checkout."""

TIME_LIMIT_S: Final = 45.0
"""Limit without the cleanup, which takes up to 15 s."""


def run(folder: Path | None, counter: Path | None, *, keep: bool, is_mutual: bool) -> None:
    """Runs the demonstration, and exits with 1 if a count was lost or a byte is corrupt.

    Args:
        folder: Folder for stores and logs, which is kept. None: a temporary folder.
        counter: The counting program. None: Leasehold's own.
        keep: Keep the fleet running at the end, until Ctrl-C.
        is_mutual: Enrol the workers and a user, and use mutual TLS.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        program = _find_counter(counter)
        with _folder(folder) as chosen:
            whole = _run_scenario(chosen, program, keep=keep, is_mutual=is_mutual)
    except KeyboardInterrupt:
        interrupted("all processes of the demonstration have ended")
    except LeaseholdError as error:
        fail(error)
    sys.exit(0 if whole else EXIT_FAILED)


def _run_scenario(folder: Path, program: Path, *, keep: bool, is_mutual: bool) -> bool:
    """Runs the whole demonstration. Returns whether no count was lost and no byte is corrupt."""
    with (
        _time_limit(TIME_LIMIT_S),
        demo_fleet(folder, is_mutual=is_mutual) as fleet,
        Client(fleet.address) as owner,
        fleet.open_client() as client,
    ):
        summary = Scenario(fleet, client, owner, DemoScreen(), program).run()
        standard_output.echo(json.dumps(summary))
        signal.setitimer(signal.ITIMER_REAL, 0)
        if keep:
            _wait_for_interrupt(fleet)
    return summary["lost"] == summary["corrupt"] == 0


def _find_counter(wanted: Path | None) -> Path:
    for program in COUNTERS if wanted is None else (wanted,):
        if program.is_file():
            return program.resolve()
    raise UsageError(
        f"the counting program {COUNTERS[0]} is missing: install Leasehold "
        "again, or name a program with --counter"
    )


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="leasehold-demo-") as made:
            yield Path(made)
    else:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(wanted, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UsageError(
                f"the folder {wanted} can't be used: {error.strerror}; name another folder with --dir"
            ) from error
        try:
            _take(descriptor, wanted)
            if (wanted / FOLDER_MARK).exists():
                raise UsageError(
                    f"the folder {wanted} has the fleet of an earlier demonstration, whose GPUs are gone: "
                    "name another folder with --dir, or delete it"
                )
            if any(wanted.iterdir()):  # the coordinator closes its folder to other users
                raise UsageError(
                    f"the folder {wanted} has other files: name a new or an empty folder with --dir"
                )
            yield wanted.resolve()
        finally:
            os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    """Locks a folder until its descriptor is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another demonstration uses the folder {folder}: end it, or name another folder with --dir"
        ) from None


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Raises DemoError in the body once the limit has passed."""

    def end(signal_number: int, frame: object) -> None:
        raise DemoError(f"the demonstration took longer than {limit_s:g} s: try again on a less busy machine")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _wait_for_interrupt(fleet: DemoFleet) -> None:
    """Returns after Ctrl-C, the regular end of a kept demonstration."""
    click.echo(
        f"The fleet keeps running until Ctrl-C. See it, and its moves on the timeline: {fleet.web_url}\n"
        f"Or try: LEASEHOLD_COORDINATOR={fleet.address} {_command()} get workloads",
        err=True,
    )
    ended = threading.Event()
    try:
        while not ended.wait(0.5):
            fleet.check()
    except KeyboardInterrupt:
        return


def _command() -> str:
    """The name or path by which a shell finds this program."""
    own = shlex.quote(str(Path(sys.executable).with_name("leasehold")))
    return "leasehold" if shutil.which("leasehold") else own


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
