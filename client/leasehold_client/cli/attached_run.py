"""``leasehold run --attach``: shows the output of a program, stops it on Ctrl-C, and exits with its code."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, final

from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED, error_line
from leasehold_client.cli.job_command import ProgramExit
from leasehold_client.cli.program_command import EXIT_REFUSED
from leasehold_client.display import standard_output
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_client.messages import workload_state

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import Workload

    from leasehold_client.coordinator.client import Client

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

REMOVE_TIMEOUT_S: Final = 10.0
REMOVE_INTERVAL_S: Final = 0.1

SIGNAL_EXIT: Final = 128
"""A shell adds this number to that of the signal that ended a program."""


def attach(client: Client, workload: Workload, *, remove: bool) -> NoReturn:
    """Prints the output of a workload until its end, and exits with the code of its program.

    The first Ctrl-C or SIGTERM stops the workload, which gets SIGTERM, and SIGKILL after 10 s. The second one
    ends this process at once, and the stop continues.

    Args:
        client: The client.
        workload: The workload, which has started.
        remove: Whether its record is deleted after its end.

    Raises:
        ProgramExit: The program has ended.
        LeaseholdError: No coordinator answers, or the output is not available. The workload continues.
    """
    interrupts = _Interrupts(client, workload)
    try:
        with interrupts.handled():
            for data in client.output(workload.workload_id, follow=True):
                if not standard_output.write(data):
                    break  # nobody reads any more, and the exit code still counts
            ended = client.wait_workload(workload.workload_id, "ended")
    except NoCoordinatorError as error:
        if interrupts.is_stopping:
            raise
        error.message += (
            f"; workload {workload.name} continues: `leasehold logs -f {workload.name}` goes on with it"
        )
        raise
    if remove:
        _remove(client, workload.workload_id)
    match ended.status.exit.WhichOneof("cause"):
        case "code":
            raise ProgramExit(ended.status.exit.code)
        case "signal_number":
            raise ProgramExit(SIGNAL_EXIT + ended.status.exit.signal_number)
        case None:
            why = f": {ended.status.error.message}" if ended.status.HasField("error") else ""
            echo_error(error_line(f"workload {workload.name} is {workload_state(ended)}{why}", ""))
            sys.exit(EXIT_REFUSED)


def _remove(client: Client, workload_id: str) -> None:
    """Deletes the record, also if the command that stopped the workload ends a moment later.

    A failure is told, and the exit code stays that of the program.
    """
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while True:
        try:
            client.delete_workload(workload_id)
            return
        except LeaseholdError as error:
            if error.reason != "WORKLOAD_BUSY" or time.monotonic() > deadline:
                echo_error(error_line(error.message, error.reason))
                return
        time.sleep(REMOVE_INTERVAL_S)


@final
class _Interrupts:
    """Turns a signal into a stop of the workload. A thread makes the call, since a handler must not block.

    Attributes:
        is_stopping: Whether a signal has come.
    """

    def __init__(self, client: Client, workload: Workload) -> None:
        self._client = client
        self._workload = workload
        self.is_stopping = False
        self._has_left = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals within the context."""
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = self._workload.name
        if self.is_stopping:
            self._has_left = True
            echo_error(f"leasehold: left; `leasehold get workloads {name}` shows its state")
            raise ProgramExit(EXIT_INTERRUPTED)
        self.is_stopping = True
        echo_error(f"leasehold: stopping {name}, which is killed after 10 s; Ctrl-C again leaves now")
        threading.Thread(target=self._stop, daemon=True).start()

    def _stop(self) -> None:
        try:
            self._client.stop(self._workload.workload_id)
        except LeaseholdError as error:
            if error.reason != "WRONG_STATE" and not self._has_left:  # WRONG_STATE: it has just ended
                echo_error(error_line(error.message, error.reason))
