"""Claiming GPUs for the calling process."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from leasehold.v1 import local_pb2, workload_pb2
from leasehold.v1.local_pb2 import ClaimChanged, ClaimOpen, ClaimRequest, ClaimWaiting
from leasehold.v1.workload_pb2 import (
    EvictionPolicy,
    HelperTerms,
    Hook,
    Resources,
    WorkloadSpec,
    WorkloadState,
)

from leasehold_client.errors import LeaseholdError
from leasehold_client.local.worker import Deadline, LocalWorker, NoWorkerError, check_access
from leasehold_client.messages import duration

RESUME_TIMEOUT_S: Final = 30.0
"""How long a worker that restarts is waited for. It gives our lease to others after as long."""

GIVE_BACK_TIMEOUT_S: Final = 5.0
"""How long it is waited for at the end of a claim."""

RESUME_PAUSE_S: Final = 0.1


@final
class LocalLease:
    """What a claim holds. Its GPUs may change when somebody moves, suspends or restores the process.

    Attributes:
        workload_id: Id of the workload that stands for this process.
        name: Its name.
        environment: Variables that name its GPUs, for child processes. Those of ``os.environ`` stay as they
            were granted, as CUDA has read them: start children that use GPUs after a move with these.
        yield_requested: Set while the claim is a helper's and somebody waits for its GPUs.
        ended: Set once the lease is over, whoever ended it.
    """

    def __init__(self, worker: LocalWorker, request: ClaimRequest, on_waiting: "OnWaiting") -> None:
        self._worker = worker
        self._on_waiting = on_waiting
        self._request = request
        self._deadline = Deadline(request.open)
        self._stream = worker.claim(request)
        self._granted = threading.Event()
        self._seen = False
        """Whether the worker has said anything: else there is none to come back to."""
        self._answered = False
        """Whether it has by this stream."""
        self._refusal: LeaseholdError | None = None
        self.workload_id = ""
        self.name = ""
        self.environment: Mapping[str, str] = {}
        self.gpu_uuids: tuple[str, ...] = ()
        """UUIDs of its GPUs now, in the order in which the process sees them. Empty while it is suspended."""
        self.state: WorkloadState.ValueType = workload_pb2.WORKLOAD_STATE_RUNNING
        """Where its workload stands."""
        self.yield_requested = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="leasehold-claim", daemon=True)
        self._thread.start()

    def wait_granted(self) -> None:
        """Waits until it is granted.

        Raises:
            LeaseholdError: It is refused.
        """
        try:
            self._granted.wait()
        except BaseException:
            self.ended.set()  # it does not come back
            self._stream.cancel()
            raise
        if self._refusal is not None:
            raise self._refusal
        if not self.workload_id:
            raise LeaseholdError("the worker ended the claim without a word: look at its log")

    def give_back(self) -> None:
        """Ends the lease. Where something is just done with the process, it ends right after that.

        A worker that restarts is waited for, for a while: it could not know, and would keep the lease.
        """
        deadline = time.monotonic() + GIVE_BACK_TIMEOUT_S
        while not self.ended.is_set():
            try:
                self._worker.release(self.workload_id)
            except NoWorkerError:
                if time.monotonic() < deadline:
                    time.sleep(RESUME_PAUSE_S)
                    continue
            except LeaseholdError:
                pass  # the end of the stream says the same, and the worker sees to it
            break
        self.ended.set()
        self._stream.cancel()
        self._thread.join(RESUME_TIMEOUT_S)

    def _follow(self) -> None:
        """Reads the stream; after a restart of the worker, that of its next start."""
        deadline = 0.0
        try:
            while not self.ended.is_set():
                try:
                    self._read()
                    return
                except NoWorkerError:
                    if self._answered:
                        deadline = time.monotonic() + RESUME_TIMEOUT_S
                    if not self._seen or self.ended.is_set() or time.monotonic() > deadline:
                        raise
                    self._resume()
        except LeaseholdError as error:
            self._refusal = error
        finally:
            self._granted.set()
            self.ended.set()

    def _resume(self) -> None:
        """Tries to go on with the next start: holds on, or waits anew behind those that came first."""
        request = ClaimRequest(resume=local_pb2.ClaimResume(workload_id=self.workload_id))
        if not self._granted.is_set():
            request = self._deadline.apply(self._request)
        if not self.ended.wait(RESUME_PAUSE_S):
            self._answered = False
            self._stream.cancel()
            self._stream = self._worker.claim(request)
            if self.ended.is_set():  # meanwhile
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
        raise NoWorkerError("the worker ended the claim without a word: look at its log")

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
        if changed.state == workload_pb2.WORKLOAD_STATE_RUNNING:  # again: it has given them back since
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
    """Claims GPUs of this host for the calling process, for as long as the context lasts.

    Waits its turn. Within the context, CUDA_VISIBLE_DEVICES and its like are set in ``os.environ``: make the
    first call to CUDA there, since CUDA reads them once. The process becomes a workload, which operators can
    suspend, restore and move like any other; it is let go at the end, and never killed. If it dies, the lease
    ends with it.

    Args:
        gpus: How many whole GPUs.
        resources: What is wanted in full, instead.
        name: What to call it. Empty: made up.
        priority: Higher goes first.
        wait_s: How long to wait. None: as long as it takes; 0: not at all.
        helper: It is a helper, on these terms.
        eviction: How it gives up its GPUs on request. None: weights retained, CUDA suspend.
        hooks: What the worker calls around that, in order.
        socket: The worker's socket. None: as :func:`~leasehold_client.local.socket_path` says.
        on_waiting: Told how the wait stands, whenever that has changed. In another thread.

    Raises:
        LeaseholdError: It is refused, or not granted in time.
    """
    spec = WorkloadSpec(
        resources=resources if resources is not None else Resources(gpu_count=gpus),
        priority=priority,
        helper=helper,
        eviction=eviction,
        hooks=hooks,
    )
    opened = ClaimOpen(name=name, spec=spec, wait=duration(wait_s), hold=local_pb2.CLAIM_HOLD_STREAM)
    check_access(socket)
    with LocalWorker(socket) as worker:
        lease = LocalLease(worker, ClaimRequest(open=opened), on_waiting)
        lease.wait_granted()
        try:
            with _environment(lease.environment):
                yield lease
        finally:
            lease.give_back()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, and afterwards puts back what they were."""
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
