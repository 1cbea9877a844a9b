"""A kernel that is served to this host's worker: the stream, and the thread that looks after it."""

import atexit
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Generic, Self, TypeVar, final

from leasehold.v1.local_pb2 import (
    KernelCall,
    KernelHello,
    KernelMethod,
    ServeKernelRequest,
    ServeKernelResponse,
)
from leasehold.v1.workload_pb2 import Kernel

from leasehold_client.errors import LeaseholdError
from leasehold_client.kernel.calls import KernelCalls, StreamOverError
from leasehold_client.kernel.protocols import CheckpointableKernel, KernelFacts
from leasehold_client.local.worker import LocalStream, LocalWorker, NoWorkerError

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 4
"""Frames to the worker that wait."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Between two tries to reach a worker. The pause doubles each time, and is random within a factor of two."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long the end waits for a method of the kernel that runs."""

_PASSING: Final = frozenset({"UNKNOWN_WORKLOAD", "ALREADY_REGISTERED", "WORKER_DRAINING"})
"""Refusals that may pass: the worker learns of a program just after its start, of an end just after it."""

C = TypeVar("C")


@final
class _Outbox:
    """Frames to the worker, in the order of their sending. Bounded: who sends waits for room."""

    def __init__(self) -> None:
        self._frames: deque[ServeKernelRequest] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, frame: ServeKernelRequest) -> None:
        """Adds one once there is room.

        Raises:
            StreamOverError: Nobody takes any.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._frames) < QUEUE_LIMIT)
            if self._closed:
                raise StreamOverError
            self._frames.append(frame)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends it for both sides."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[ServeKernelRequest]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._frames)
                if self._closed:
                    return
                frame = self._frames.popleft()
                self._changed.notify_all()
            yield frame


@final
class ServedKernel(Generic[C]):
    """A kernel that the worker may call, until it is closed. A context manager, which closes it.

    A worker that restarts is looked for until it is back. Whenever the stream is lost, the kernel goes on as
    if by ``cancel``.

    Args:
        kernel: The kernel, as plain threads call it.
        facts: Which one it is.
        path: The worker's socket. None: it is not served.
        announced: The program was started to be restored, as its environment says.
    """

    def __init__(
        self,
        kernel: CheckpointableKernel[C],
        facts: KernelFacts[C],
        path: str | Path | None,
        *,
        announced: bool = False,
    ) -> None:
        self._calls = KernelCalls(kernel, facts)
        self._facts = Kernel(kernel_id=facts.kernel_id, kind=facts.kind, version=facts.version)
        self._path = path
        self._announced = announced
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._stream: LocalStream[ServeKernelResponse] | None = None
        self._welcomed = False
        """Whether a worker knows us now."""
        self._told = False
        """Whether one ever has."""
        self._pending = False
        """Whether we were told to wait for a restore, and have not been restored."""
        self._begun = False
        self._restored_checkpoint_id = ""
        self._error: LeaseholdError | None = None
        """The last one."""
        self._refused = False
        self._thread = threading.Thread(target=self._follow, name="leasehold-kernel", daemon=True)
        if path is None:
            self._closed.set()
        else:
            atexit.register(self.close)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_served(self) -> bool:
        """Whether a worker can call it now."""
        return self._welcomed

    @property
    def restored_checkpoint_id(self) -> str:
        """What it was restored from. Empty: it began afresh."""
        return self._restored_checkpoint_id

    def wait_begun(self, wait_s: float, restore_wait_s: float, *, required: bool) -> None:
        """Waits until the application may begin: it is restored, or nothing is to be restored.

        Args:
            wait_s: How long a worker may take to know it.
            restore_wait_s: How long a restore that the worker has said may take.
            required: Without a worker, it may not begin. Nor may it if its restore was announced.

        Raises:
            LeaseholdError: It may not begin. It is closed then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._told or self._closed.is_set(), wait_s)
            if self._announced and not self._told and not self._closed.is_set():
                logger.warning(
                    "no answer from the worker at %s within %g s: waiting, as this program is to be restored",
                    self._path,
                    wait_s,
                )
                self._changed.wait_for(lambda: self._told or self._closed.is_set(), restore_wait_s)
            error = None
            if self._told:
                if not self._changed.wait_for(
                    lambda: not self._pending or self._closed.is_set(), restore_wait_s
                ):
                    error = LeaseholdError(
                        f"the worker has a checkpoint to restore, and did not within {restore_wait_s:g} s: "
                        "see its log, or allow more time"
                    )
            elif required or self._refused or self._announced:
                waited_s = wait_s + restore_wait_s if self._announced else wait_s
                error = self._error or NoWorkerError(
                    f"the worker at {self._path} did not answer within {waited_s:g} s: see its log"
                )
            self._begun = error is None and not self._pending
        if error is not None:
            self.close()
            raise error

    def close(self) -> None:
        """Ends the service. A method of the kernel that runs is waited for, for a while."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return  # a fork's end is no end of ours: what it has of gRPC and of locks does not work there
        with self._changed:
            self._closed.set()
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _follow(self) -> None:
        """Serves the kernel by one stream after the other."""
        pause_s = FIRST_PAUSE_S
        with LocalWorker(self._path) as worker:
            while not self._closed.is_set():
                try:
                    self._serve(worker)
                except (LeaseholdError, StreamOverError) as error:
                    self._note(error)
                except Exception:
                    logger.exception("serving the kernel failed by a defect: it is tried again")
                if self._welcomed:
                    pause_s = FIRST_PAUSE_S
                self._leave()
                self._closed.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _note(self, error: LeaseholdError | StreamOverError) -> None:
        if self._closed.is_set():
            return
        if self._welcomed:
            logger.warning("the worker is gone (%s): it is looked for until it is back", error)
        if isinstance(error, LeaseholdError):
            with self._changed:
                self._error = error
                passing = isinstance(error, NoWorkerError) or error.reason in _PASSING
                if not passing and not self._told:
                    logger.warning("the worker refuses the kernel: %s", error.message)
                    self._refused = True
                    self._closed.set()
                self._changed.notify_all()

    def _leave(self) -> None:
        """The stream is over: nobody else lets the kernel go on."""
        self._welcomed = False
        try:
            self._calls.undo()
        except Exception:
            logger.exception("the kernel could not go on")

    def _serve(self, worker: LocalWorker) -> None:
        """Serves by one stream, to its end.

        Raises:
            LeaseholdError: The worker refuses, or is gone.
            StreamOverError: It went away in the middle of a call.
        """
        outbox = _Outbox()
        stream = worker.serve_kernel(iter(outbox))
        try:
            with self._changed:
                self._stream = stream
                if self._closed.is_set():
                    return
            stream.on_end(outbox.close)
            outbox.put(ServeKernelRequest(hello=self._hello()))
            frames = iter(stream)
            for frame in frames:
                match frame.WhichOneof("frame"):
                    case "welcome":
                        self._welcome(frame.welcome.restore_pending)
                    case "call":
                        self._answer(frame.call, frames, outbox)
                    case _:
                        pass  # of a call that we have given up
        finally:
            with self._changed:
                self._stream = None
            outbox.close()
            stream.cancel()
        raise NoWorkerError("the worker ended the stream")

    def _hello(self) -> KernelHello:
        with self._changed:
            return KernelHello(
                kernel=self._facts,
                workload_id=os.environ.get("LEASEHOLD_WORKLOAD_ID", ""),
                begun=self._begun,
            )

    def _welcome(self, restore_pending: bool) -> None:
        with self._changed:
            # Once a restore was announced, it stays so: a worker that restarted may not know of it.
            self._pending = (self._pending or restore_pending) and not self._begun
            self._welcomed = self._told = True
            self._changed.notify_all()

    def _answer(self, call: KernelCall, frames: Iterator[ServeKernelResponse], outbox: _Outbox) -> None:
        if call.method != KernelMethod.KERNEL_METHOD_RESTORE:
            answer = self._calls.answer(call, outbox.put)
        else:
            with self._changed:
                refusal = "" if self._pending else "the application works already: start it anew"
            answer = self._calls.restore(call, frames, refusal)
            if answer.HasField("done"):
                self._settle(call.checkpoint_id)
        outbox.put(ServeKernelRequest(answer=answer))

    def _settle(self, checkpoint_id: str) -> None:
        """It is restored: it may begin."""
        with self._changed:
            if not self._begun:
                self._restored_checkpoint_id = checkpoint_id
            self._pending = False
            self._begun = True
            self._changed.notify_all()
