"""The wait of ``leasehold exec`` for a grant, and its status lines."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final, final

from leasehold.local.v1.local_service_pb2 import ClaimGranted, ClaimRequest, ClaimWaiting

from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError
from leasehold_client.local.worker import Deadline, LocalWorker, NoWorkerError, check_access

RESTART_TIMEOUT_S: Final = 30.0
"""How long a restart of the worker is tolerated."""

RESTART_PAUSE_S: Final = 0.2

SILENCE_S: Final = 5.0
"""How long a worker may be silent before a line says so."""

LINE_INTERVAL_S: Final = 1.0
"""Shortest time between two status lines."""


def wait_granted(socket: Path | None, request: ClaimRequest) -> tuple[LocalWorker, ClaimGranted]:
    """Waits for the grant of a claim. After a restart of the worker, the claim is made again.

    Returns:
        The open connection and the grant.

    Raises:
        LeaseholdError: The claim is refused, or the worker ended it without a reason.
        NoWorkerError: No worker answers, the restart lasted longer than 30 s, or the wait was over before the
            end of the restart.
    """
    check_access(socket)
    deadline = Deadline(request.open)
    give_up_at = 0.0
    while True:
        lines = StatusLines()
        try:
            with ExitStack() as stack:
                worker = stack.enter_context(LocalWorker(socket, deadline.connect_timeout_s))
                stack.callback(lines.close)
                lines.expect(worker.path)
                for response in worker.claim(request, deadline.answer_timeout_s):
                    if response.HasField("granted"):
                        lines.close()
                        stack.pop_all()
                        return worker, response.granted
                    if response.HasField("waiting"):
                        lines.show(response.waiting)
        except NoWorkerError:
            if lines.any and not deadline.is_over:
                echo_error("leasehold: the worker has ended or restarts; waiting again")
                give_up_at = time.monotonic() + RESTART_TIMEOUT_S
            if time.monotonic() > give_up_at:
                raise
            time.sleep(RESTART_PAUSE_S)
            if deadline.is_over:
                raise
            request = deadline.apply(request)
        else:
            raise LeaseholdError("the worker ended the claim without a reason: see its log")


@final
class StatusLines:
    """Prints a line when the place in the queue or the reason changes, at most one per interval.

    After several changes within an interval, the newest state is printed at its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: object = None
        self._newest: ClaimWaiting | None = None
        self._next_at = 0.0
        self._timer: threading.Timer | None = None
        self._silence: threading.Timer | None = None
        self._closed = False

    @property
    def any(self) -> bool:
        """Whether a state was reported."""
        return self._newest is not None

    def expect(self, path: Path) -> None:
        """Prints a line about a silent worker, unless a state is reported or the lines are closed in time."""
        timer = threading.Timer(SILENCE_S, self._write_silence, (path,))
        timer.daemon = True
        timer.start()
        self._silence = timer  # only now, as in show()

    def show(self, waiting: ClaimWaiting) -> None:
        """Prints a state, now or at the end of the interval."""
        with self._lock:
            self._newest = waiting
            left_s = self._next_at - time.monotonic()
            if left_s <= 0:
                self._write(waiting)
            elif self._timer is None:
                timer = threading.Timer(left_s, self._write_late)
                timer.daemon = True
                timer.start()
                self._timer = timer  # only now: Ctrl-C may interrupt the start, and close() joins this timer

    def close(self) -> None:
        """Stops printing."""
        with self._lock:
            self._closed = True
            timers = self._timer, self._silence
        for timer in timers:
            if timer is not None:
                timer.cancel()
                timer.join()

    def _write_silence(self, path: Path) -> None:
        with self._lock:
            if self._newest is None and not self._closed:
                echo_error(f"leasehold: the worker at {path} does not answer yet")

    def _write_late(self) -> None:
        with self._lock:
            self._timer = None
            if self._newest is not None and not self._closed:
                self._write(self._newest)

    def _write(self, waiting: ClaimWaiting) -> None:
        if self._shown != (waiting.position, waiting.reason):
            self._shown = (waiting.position, waiting.reason)
            self._next_at = time.monotonic() + LINE_INTERVAL_S
            place = f"{waiting.position} of {waiting.pending_claimers} in the queue"
            echo_error(f"leasehold: waiting, {place}: {waiting.reason}")
