"""``leasehold run --attach``: shows the output of a program, stops it on Ctrl-C, and exits with its code."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, final

from leasehold_client.cli.conclusion import conclude
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED, error_line
from leasehold_client.cli.job_command import ProgramExit
from leasehold_client.cli.program_command import EXIT_REFUSED
from leasehold_client.coordinator.retry import has_too_many_streams, is_outage, is_transient
from leasehold_client.display import standard_output
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError
from leasehold_client.messages import workload_state

if TYPE_CHECKING:
    from leasehold.v1.command_pb2 import Command
    from leasehold.v1.workload_pb2 import Workload

    from leasehold_client.cli.verb import CommandOptions
    from leasehold_client.coordinator.client import Client

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

REMOVE_TIMEOUT_S: Final = 10.0
REMOVE_INTERVAL_S: Final = 0.1
BUSY_INTERVAL_S: Final = 1.0
"""Time between two attempts to stop a workload that has another command."""

SIGNAL_EXIT: Final = 128
"""A shell adds this number to that of the signal that ended a program."""


def attach(
    client: Client, workload: Workload, command: Command, options: CommandOptions, *, remove: bool
) -> NoReturn:
    """Waits for the start of a workload, prints its output until its end, and exits with its program's code.

    The first Ctrl-C or SIGTERM stops the workload, which gets SIGTERM, and SIGKILL after 10 s. During the
    start, it cancels the start. The second one ends this process at once, and a stored stop continues.

    Args:
        client: The client.
        workload: The workload.
        command: The command that starts the workload.
        options: Wait for the start, and output format.
        remove: Whether the record of the workload is deleted after its end.

    Raises:
        ProgramExit: The program has ended, or its start was cancelled.
        LeaseholdError: No coordinator answers, or the output is not available. The workload continues, unless
            its host has failed.
    """
    interrupts = _Interrupts(client, workload, command)
    with interrupts.handled():
        _wait_started(client, workload, command, options, interrupts, remove=remove)
        try:
            for data in client.output(workload.workload_id, follow=True):
                if not standard_output.write(data):
                    break  # nobody reads any more, and the exit code still counts
            ended = client.wait_workload(workload.workload_id, "ended")
        except LeaseholdError as error:
            if is_transient(error) and not interrupts.is_stopping:
                error.message += f"; {_way_on(error, workload.name)}"
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


def _way_on(error: LeaseholdError, name: str) -> str:
    if is_outage(error) or has_too_many_streams(error):
        return f"workload {name} continues: `leasehold logs -f {name}` goes on with it"
    return f"`leasehold get workloads {name}` shows whether workload {name} continues"


def _wait_started(
    client: Client,
    workload: Workload,
    command: Command,
    options: CommandOptions,
    interrupts: _Interrupts,
    *,
    remove: bool,
) -> None:
    """Waits for the start of a workload.

    Raises:
        ProgramExit: A signal has come, and the workload has not started.
        SystemExit: The start failed.
    """
    try:
        conclude(client, command, workload.name, replace(options, quiet=True))
    except ProgramExit:  # the second signal
        raise
    except SystemExit:
        if remove:  # a program that was never started has a record, too
            with suppress(LeaseholdError):  # its workload has not ended, such as after a timeout
                client.delete_workload(workload.workload_id)
        if interrupts.is_stopping:
            raise ProgramExit(EXIT_INTERRUPTED) from None
        raise
    interrupts.tell_started()


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
    """Turns a signal into a stop of the workload, or into a cancellation of its start.

    A thread makes the call, since a handler must not block.

    Attributes:
        is_stopping: Whether a signal has come.
    """

    def __init__(self, client: Client, workload: Workload, command: Command) -> None:
        self._client = client
        self._workload = workload
        self._command = command
        self.is_stopping = False
        self._has_started = False
        self._has_left = False
        self._is_stop_made = False
        self._is_refused = False
        """Whether the stop waits for another command of the workload."""

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals within the context."""
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def tell_started(self) -> None:
        """Notes the start. A workload that started in spite of a signal is stopped."""
        self._has_started = True
        if self.is_stopping and not self._is_stop_made:
            self._begin_stop(f"{self._workload.name} started before its cancellation: ")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = self._workload.name
        if self.is_stopping:
            self._has_left = True
            undone = "nothing was stopped: " if self._is_refused else ""
            echo_error(f"leasehold: left; {undone}`leasehold get workloads {name}` shows its state")
            raise ProgramExit(EXIT_INTERRUPTED)
        self.is_stopping = True
        if self._has_started:
            self._begin_stop()
            return
        echo_error(f"leasehold: cancelling the start of {name}; Ctrl-C again leaves now")
        threading.Thread(target=self._cancel, daemon=True).start()

    def _begin_stop(self, why: str = "") -> None:
        self._is_stop_made = True
        echo_error(
            f"leasehold: {why}stopping {self._workload.name}, which is killed after 10 s; "
            "Ctrl-C again leaves now"
        )
        threading.Thread(target=self._stop, daemon=True).start()

    def _cancel(self) -> None:
        try:
            self._client.cancel(self._command.command_id)
        except LeaseholdError as error:
            self._tell(error)

    def _stop(self) -> None:
        """Stops the workload, once its other commands have ended."""
        while True:
            try:
                self._client.stop(self._workload.workload_id)
                self._is_refused = False
                return
            except LeaseholdError as error:
                if error.reason != "WORKLOAD_BUSY":
                    if error.reason != "WRONG_STATE":  # it has just ended
                        self._tell(error)
                    return
                if not self._is_refused:
                    self._is_refused = True
                    self._tell(LeaseholdError(f"the stop waits: {error.message}"))
            time.sleep(BUSY_INTERVAL_S)

    def _tell(self, error: LeaseholdError) -> None:
        if not self._has_left:
            echo_error(error_line(error.message, error.reason))
