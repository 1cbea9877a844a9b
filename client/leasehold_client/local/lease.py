"""Leases of the calling process: claims of GPUs of this host."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from leasehold.local.v1 import local_service_pb2
from leasehold.local.v1.local_service_pb2 import ClaimChanged, ClaimOpen, ClaimRequest, ClaimWaiting
from leasehold.v1 import workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.hook_pb2 import Hook
from leasehold.v1.workload_pb2 import HelperTerms, Resources, WorkloadSpec, WorkloadState

from leasehold_client.errors import LeaseholdError
from leasehold_client.local.worker import Deadline, LocalWorker, NoWorkerError, check_access
from leasehold_client.messages import duration
from leasehold_client.request_fields import build

RESUME_TIMEOUT_S: Final = 30.0
"""How long a restart of the worker is tolerated. The worker revokes the lease after the same time."""

GIVE_BACK_TIMEOUT_S: Final = 5.0
"""How long a restart of the worker is tolerated at the end of a claim."""

RESUME_PAUSE_S: Final = 0.1


@final
class LocalLease:
    """The lease of a claim. Its GPUs change if an operator moves, suspends or restores the process.

    Attributes:
        workload_id: Id of the workload of this process.
        name: Name of the workload.
        environment: Variables for child processes that use the GPUs. They follow a move, while ``os.environ``
            keeps the values of the grant, since CUDA has read these already.
        yield_requested: Set while the worker asks this preemptible claim for its GPUs. Cleared once the
            process was restored, or keeps its GPUs.
        ended: Set once the lease has ended, for any reason.
    """

    def __init__(self, worker: LocalWorker, request: ClaimRequest, on_waiting: "OnWaiting") -> None:
        self._worker = worker
        self._on_waiting = on_waiting
        self._request = request
        self._deadline = Deadline(request.open)
        self._stream = worker.claim(request)
        self._pid = os.getpid()
        self._granted = threading.Event()
        self._seen = False
        """Whether the worker has ever answered. Only then is a lost connection resumed."""
        self._answered = False
        """Whether the worker has answered on the current stream."""
        self._refusal: LeaseholdError | None = None
        self.workload_id = ""
        self.name = ""
        self.environment: Mapping[str, str] = {}
        self.gpu_uuids: tuple[str, ...] = ()
        """UUIDs of the current GPUs, in the order of the process. Empty while the process is suspended."""
        self.state: WorkloadState.ValueType = workload_pb2.WORKLOAD_STATE_RUNNING
        """State of the workload."""
        self.yield_requested = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="leasehold-claim", daemon=True)
        self._thread.start()

    def wait_granted(self) -> None:
        """Waits for the grant. An exception in the wait, such as KeyboardInterrupt, withdraws the claim.

        Raises:
            LeaseholdError: The claim is refused or timed out.
            NoWorkerError: No worker answers.
        """
        try:
            if not self._granted.wait(self._deadline.answer_timeout_s):
                raise self._worker.silent()
        except BaseException:
            self.ended.set()  # stops the thread from resuming
            self._stream.cancel()
            raise
        if self._refusal is not None:
            raise self._refusal
        if not self.workload_id:
            raise LeaseholdError("the worker ended the claim without a reason: see its log")

    def give_back(self) -> None:
        """Ends the lease. If an operation on the process is running, the lease ends after the operation.

        A restart of the worker is tolerated for 5 s, since the restarted worker would keep the lease. A
        forked child gives nothing back: the lease is that of its parent.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + GIVE_BACK_TIMEOUT_S
        while not self.ended.is_set():
            try:
                self._worker.release(self.workload_id)
            except NoWorkerError:
                if time.monotonic() < deadline:
                    time.sleep(RESUME_PAUSE_S)
                    continue
            except LeaseholdError:
                pass  # the end of the stream releases the lease too
            break
        self.ended.set()
        self._stream.cancel()
        self._thread.join(RESUME_TIMEOUT_S)

    def _follow(self) -> None:
        """Reads the stream, and resumes it after a restart of the worker."""
        deadline = 0.0
        try:
            while not self.ended.is_set():
                try:
                    self._read()
                    return
                except NoWorkerError:
                    if self._answered:
                        deadline = time.monotonic() + RESUME_TIMEOUT_S
                    if not self._seen or self.ended.wait(RESUME_PAUSE_S) or time.monotonic() > deadline:
                        raise
                    if self._deadline.is_over and not self._granted.is_set():
                        raise
                    self._resume()
        except LeaseholdError as error:
            self._refusal = error
        finally:
            self._granted.set()
            self.ended.set()

    def _resume(self) -> None:
        """Resumes the lease at a restarted worker, or repeats the claim if it was not granted yet."""
        request = ClaimRequest(resume=local_service_pb2.ClaimResume(workload_id=self.workload_id))
        if not self._granted.is_set():
            request = self._deadline.apply(self._request)
        self._answered = False
        self._stream.cancel()
        self._stream = self._worker.claim(request)
        if self.ended.is_set():  # set since the check of the caller
            self._stream.cancel()

    def _read(self) -> None:
        for response in self._stream:
            self._seen = self._answered = True
            match response.WhichOneof("frame"):
                case "waiting":
                    self._on_waiting(response.waiting)
                case "granted":
                    granted = response.granted
                    self.workload_id, self.name = granted.workload_id, granted.name
                    self.environment = dict(granted.environment)
                    self.gpu_uuids = tuple(granted.lease.gpu_uuids)
                    self._granted.set()
                case "changed":
                    self._change(response.changed)
                case "yield_request":
                    self.yield_requested.set()
                case "ended":
                    return
                case None:
                    pass
        raise NoWorkerError("the worker ended the claim without a reason: see its log")

    def _change(self, changed: ClaimChanged) -> None:
        self.state = changed.state
        self.gpu_uuids = tuple(changed.lease.gpu_uuids)
        visible = ",".join(self.gpu_uuids) or "-1"
        self.environment = {
            **self.environment,
            "CUDA_VISIBLE_DEVICES": visible,
            "NVIDIA_VISIBLE_DEVICES": visible,
            "LEASEHOLD_LEASE_ID": changed.lease.lease_id,
        }
        if changed.state == workload_pb2.WORKLOAD_STATE_RUNNING:  # restored, or the request is withdrawn
            self.yield_requested.clear()


OnWaiting = Callable[[ClaimWaiting], None]


@contextmanager
def claim(
    gpus: int = 1,
    *,
    resources: Resources | None = None,
    name: str = "",
    priority: int = 0,
    wait_s: float | None = None,
    helper: HelperTerms | None = None,
    eviction: EvictionPolicy | None = None,
    hooks: Sequence[Hook] = (),
    socket: str | Path | None = None,
    on_waiting: OnWaiting = lambda _: None,
) -> Iterator[LocalLease]:
    """Leases GPUs of this host for the calling process while the context lasts.

    The claim waits in the worker's queue. Within the context, ``os.environ`` has CUDA_VISIBLE_DEVICES and
    similar variables. CUDA reads them once, so make the first CUDA call within the context. The process is a
    workload that operators can suspend, restore and move. The end of the context or of the process ends the
    lease. The worker never kills the process.

    Args:
        gpus: Number of whole GPUs.
        resources: All resources, which replace ``gpus``.
        name: Name of the workload. Empty: generated.
        priority: Priority in the queue, higher first.
        wait_s: Longest wait. None: no limit; 0: no wait. A worker has 10 s more to answer.
        helper: Terms of a preemptible workload. None: not preemptible.
        eviction: Eviction policy. None: ``retain+cuda_suspend``.
        hooks: Hooks around suspend and restore, in order.
        socket: The worker's socket. None: :func:`~leasehold_client.local.socket_path`.
        on_waiting: Called in another thread with the place in the queue, after each change.

    Raises:
        LeaseholdError: The claim is refused or timed out.
        UsageError: ``wait_s`` is negative, infinite or more than 1e9.
        NoWorkerError: No worker answers.
    """
    spec = build(
        WorkloadSpec,
        resources=resources if resources is not None else build(Resources, gpu_count=gpus),
        priority=priority,
        helper=helper,
        eviction=eviction,
        hooks=hooks,
    )
    opened = build(
        ClaimOpen, name=name, spec=spec, wait=duration(wait_s), hold=local_service_pb2.CLAIM_HOLD_STREAM
    )
    check_access(socket)
    with LocalWorker(socket, Deadline(opened).connect_timeout_s) as worker:
        lease = LocalLease(worker, ClaimRequest(open=opened), on_waiting)
        lease.wait_granted()
        try:
            with _environment(lease.environment):
                yield lease
        finally:
            lease.give_back()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, and restores the former values afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
