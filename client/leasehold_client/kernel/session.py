"""A served application: its stream to the worker of this host, and the thread of the stream."""

import atexit
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Generic, Self, TypeVar, final

from leasehold.local.v1.kernel_pb2 import KernelCall, KernelHello, KernelMethod
from leasehold.local.v1.local_service_pb2 import ServeKernelRequest, ServeKernelResponse
from leasehold.v1.workload_pb2 import Kernel

from leasehold_client.errors import LeaseholdError
from leasehold_client.kernel.calls import KernelCalls, StreamOverError
from leasehold_client.kernel.protocols import CheckpointableKernel, KernelFacts
from leasehold_client.local.worker import LocalStream, LocalWorker, NoWorkerError

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 4
"""Largest number of queued frames to the worker."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Range of the pause between connection attempts, which doubles each time and has a random factor."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long ``close`` waits for a running method of the application."""

_TRANSIENT: Final = frozenset({"UNKNOWN_WORKLOAD", "ALREADY_REGISTERED", "WORKER_DRAINING"})
"""Transient refusals: the worker learns of the start and end of a program a little later."""

C = TypeVar("C")


@final
class _Outbox:
    """A bounded queue of frames to the worker. ``put`` blocks while the queue is full."""

    def __init__(self) -> None:
        self._frames: deque[ServeKernelRequest] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, frame: ServeKernelRequest) -> None:
        """Adds a frame, once there is room.

        Raises:
            StreamOverError: The queue is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._frames) < QUEUE_LIMIT)
            if self._closed:
                raise StreamOverError
            self._frames.append(frame)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends ``put`` and the iteration."""
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
    """An application that the worker may call until ``close``, or until the end of the context.

    After a restart of the worker, the stream is opened again. The end of a stream has the effect of
    ``cancel`` on the application.

    Args:
        kernel: The application.
        facts: Identity and checkpoint format of the application.
        path: The worker's socket. None: the application is not served.
        announced: Whether the worker started the program for a restore.
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
        """Whether a worker serves the application now."""
        self._ever_welcomed = False
        """Whether a worker has ever served the application."""
        self._pending = False
        """Whether a restore is announced and not done."""
        self._begun = False
        self._restored_checkpoint_id = ""
        self._error: LeaseholdError | None = None
        """The last error of the stream."""
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
        """Whether a worker can call the application now."""
        return self._welcomed

    @property
    def restored_checkpoint_id(self) -> str:
        """The checkpoint of the restore. Empty: the application was not restored."""
        return self._restored_checkpoint_id

    def wait_begun(self, wait_s: float, restore_wait_s: float, *, required: bool) -> None:
        """Waits until the application may start: after its restore, or if there is nothing to restore.

        Args:
            wait_s: Longest wait for a worker.
            restore_wait_s: Longest wait for an announced restore.
            required: Whether a missing worker is an error. An announced restore always requires a worker.

        Raises:
            LeaseholdError: The application may not start. It is closed then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ever_welcomed or self._closed.is_set(), wait_s)
            if self._announced and not self._ever_welcomed and not self._closed.is_set():
                logger.warning(
                    "no answer from the worker at %s within %g s: waiting for the restore of this program",
                    self._path,
                    wait_s,
                )
                self._changed.wait_for(lambda: self._ever_welcomed or self._closed.is_set(), restore_wait_s)
            error = None
            if self._ever_welcomed:
                if not self._changed.wait_for(
                    lambda: not self._pending or self._closed.is_set(), restore_wait_s
                ):
                    error = LeaseholdError(
                        f"the worker did not restore the announced checkpoint within {restore_wait_s:g} s: "
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
        """Ends the service. Waits up to 5 s for a running method of the application."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return  # a forked child: gRPC and the locks do not work here
        with self._changed:
            self._closed.set()
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _follow(self) -> None:
        """Serves the application over one stream after another."""
        pause_s = FIRST_PAUSE_S
        with LocalWorker(self._path) as worker:
            while not self._closed.is_set():
                try:
                    self._serve(worker)
                except (LeaseholdError, StreamOverError) as error:
                    self._note(error)
                except Exception:
                    logger.exception("a defect ended the service of the application: retrying")
                if self._welcomed:
                    pause_s = FIRST_PAUSE_S
                self._leave()
                self._closed.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _note(self, error: LeaseholdError | StreamOverError) -> None:
        if self._closed.is_set():
            return
        if self._welcomed:
            logger.warning("lost the worker (%s): reconnecting", error)
        if isinstance(error, LeaseholdError):
            with self._changed:
                self._error = error
                transient = (
                    isinstance(error, NoWorkerError)
                    or error.reason in _TRANSIENT
                    or "retry_after_s" in error.metadata  # the worker bounds a rate
                )
                if not transient and not self._ever_welcomed:
                    logger.warning("the worker refuses the application: %s", error.message)
                    self._refused = True
                    self._closed.set()
                self._changed.notify_all()

    def _leave(self) -> None:
        """Ends a quiescence that the worker can't end any more."""
        self._welcomed = False
        try:
            self._calls.undo()
        except Exception:
            logger.exception("the application's cancel raised an exception")

    def _serve(self, worker: LocalWorker) -> None:
        """Serves over one stream until its end.

        Raises:
            LeaseholdError: The worker refused the application, or the connection broke.
            StreamOverError: The stream ended during a call.
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
                        pass  # belongs to an abandoned call
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
            # An announced restore stays announced, since a restarted worker may not know of it.
            self._pending = (self._pending or restore_pending) and not self._begun
            self._welcomed = self._ever_welcomed = True
            self._changed.notify_all()

    def _answer(self, call: KernelCall, frames: Iterator[ServeKernelResponse], outbox: _Outbox) -> None:
        if call.method != KernelMethod.KERNEL_METHOD_RESTORE:
            answer = self._calls.answer(call, outbox.put)
        else:
            with self._changed:
                refusal = "" if self._pending else "the application has already started: restart the program"
            answer = self._calls.restore(call, frames, refusal)
            if answer.HasField("done"):
                self._record_restore(call.checkpoint_id)
        outbox.put(ServeKernelRequest(answer=answer))

    def _record_restore(self, checkpoint_id: str) -> None:
        """Records a restore, after which the application may start."""
        with self._changed:
            if not self._begun:
                self._restored_checkpoint_id = checkpoint_id
            self._pending = False
            self._begun = True
            self._changed.notify_all()
