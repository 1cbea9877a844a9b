"""The checkpointable applications of this host, by workload. On trio's side."""

import logging
import math
import re
from typing import Final, final

import trio
from leasehold.local.v1 import kernel_pb2
from leasehold.local.v1.kernel_pb2 import KernelHello
from leasehold.local.v1.local_service_pb2 import ServeKernelResponse
from leasehold.v1 import errors_pb2, workload_pb2

from leasehold_worker.applications.application import Application
from leasehold_worker.applications.stream import ApplicationStream, StreamLostError
from leasehold_worker.change import Change
from leasehold_worker.errors import OperationError, defect, invalid
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.processes import cancel_at_end, is_alive
from leasehold_worker.workloads.foreign_processes import owner, read_mark
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import RUNNING
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 10.0
"""Time for a stream to send its hello."""

HEALTH_INTERVAL_S: Final = 30.0
"""Interval of health queries."""

REGISTRATIONS_BURST: Final = 8
"""Registrations of one workload's applications at once."""

REGISTRATION_INTERVAL_S: Final = 10.0
"""Interval of further registrations. Each makes two writes to the journal, and two events."""

NAME_LIMIT: Final = 128
"""Characters of an application's id and of its kind."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]*", re.ASCII)


@final
class ApplicationRegistry:
    """The registry. A workload has at most one checkpointable application, as long as its stream.

    Args:
        workloads: The workloads of this host.
        nursery: Runs the tasks of streams.
    """

    def __init__(self, workloads: Workloads, nursery: trio.Nursery) -> None:
        self._workloads = workloads
        self._nursery = nursery
        self._served: dict[str, Application] = {}
        self._peers: dict[str, Peer] = {}
        self._sessions: set[ApplicationStream] = set()
        self._expected: set[str] = set()
        self._due_s: dict[str, float] = {}
        """By workload: when its debt of registrations is paid. Workloads without a debt are missing."""
        self._changed = Change()

    def of(self, workload_id: str) -> Application | None:
        """The application of a workload. None: it has none now."""
        kernel = self._served.get(workload_id)
        if kernel is None or kernel.is_gone or not is_alive(self._peers[workload_id].identity):
            return None  # the end of a process is seen before that of its stream
        return kernel

    async def wait_served(self, workload_id: str, timeout_s: float) -> Application:
        """Waits until a workload has a checkpointable application.

        Raises:
            OperationError: KERNEL_NOT_READY: none has registered in time, or the workload has ended.
        """
        found: list[Application] = []
        workload = self._workloads.get(workload_id)
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_at_end, workload, nursery.cancel_scope)
                nursery.start_soon(cancel_at_end, workload.root, nursery.cancel_scope)
                while (kernel := self.of(workload_id)) is None:
                    await self._changed.wait()
                found.append(kernel)
                nursery.cancel_scope.cancel()
        if found:
            return found[0]
        has_ended = workload.ended.is_set() or not is_alive(workload.root)
        how = "ended before that" if has_ended else f"did not register within {timeout_s:g} s"
        raise OperationError(
            errors_pb2.ERROR_REASON_KERNEL_NOT_READY,
            f"workload {workload.name} has no checkpointable application: it {how}; have it "
            "call leasehold_client.kernel.serve, and see its output",
            {"workload_id": workload_id},
        )

    def expect_restore(self, workload_id: str) -> None:
        """Tells a program's application to wait for its restore. Call it before the start."""
        self._expected.add(workload_id)

    def forget_restore(self, workload_id: str) -> None:
        """Ends the wait for a restore, and applications that still wait."""
        self._expected.discard(workload_id)

    def begin(self, session: ApplicationStream) -> None:
        """Begins to serve a stream."""
        self._sessions.add(session)
        self._nursery.start_soon(self._serve, session)

    def close(self) -> None:
        """Ends all streams as the worker stops. Applications continue, and reconnect at its next start."""
        for session in tuple(self._sessions):
            session.close()

    async def _serve(self, session: ApplicationStream) -> None:
        try:
            await self._answer(session)
        except OperationError as error:
            session.close(error)
        except StreamLostError:
            logger.debug("process %d disconnected before it identified itself", session.peer.identity.pid)
        except Exception:
            logger.exception("the stream of an application failed because of a defect")
            session.close(defect())
        finally:
            self._sessions.discard(session)
            session.close()

    async def _answer(self, session: ApplicationStream) -> None:
        hello = await _receive_hello(session)
        workload = await self._admit(session.peer, hello)
        workload_id = workload.workload_id
        pending = workload_id in self._expected and not hello.begun
        kernel = Application(session, workload, hello)
        welcome = kernel_pb2.KernelWelcome(workload_id=workload_id, restore_pending=pending)
        self._served[workload_id], self._peers[workload_id] = kernel, session.peer
        try:
            await session.send(ServeKernelResponse(welcome=welcome))
            self._workloads.set_kernel(workload, hello.kernel)
            logger.info(
                "workload %s is checkpointable: application %s", workload.name, hello.kernel.kernel_id
            )
            self._changed.notify()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow_health, kernel)
                await session.gone.wait()
                nursery.cancel_scope.cancel()
        finally:
            if self._served.get(workload_id) is kernel:
                del self._served[workload_id], self._peers[workload_id]
                self._workloads.set_kernel(workload, None)
            self._changed.notify()

    async def _follow_health(self, kernel: Application) -> None:
        """Queries the health of an application while its workload runs, and reports it."""
        while True:
            await trio.sleep(HEALTH_INTERVAL_S)
            if kernel.workload.state == RUNNING and not kernel.is_busy:
                told = workload_pb2.Kernel()
                told.CopyFrom(kernel.facts)
                try:
                    told.health = await kernel.health()
                except OperationError as error:
                    logger.warning("workload %s: %s", kernel.workload.name, error.message)
                    told.health = workload_pb2.KERNEL_HEALTH_UNSPECIFIED
                if not kernel.is_gone:
                    self._workloads.set_kernel(kernel.workload, told)

    async def _admit(self, peer: Peer, hello: KernelHello) -> Workload:
        """The workload of a process that registers an application.

        Raises:
            OperationError: The process belongs to no workload or to another user's, or the workload has an
                application, or has recently had too many.
        """
        _check_facts(hello)
        pid = peer.identity.pid
        marked_id = await read_mark(pid)
        workload = owner(pid, self._workloads.all(), marked_id)
        if workload is None or hello.workload_id not in ("", workload.workload_id):
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
                f"process {pid} belongs to no workload {hello.workload_id[:NAME_LIMIT]!r} of "
                "this worker: start it with `leasehold run` or `leasehold exec`, or have it "
                "claim its GPUs first",
                {"pid": str(pid)},
            )
        if not peer.is_trusted and peer.uid != workload.uid:
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"workload {workload.name} is of user {workload.user}: process {pid} of {peer.user} can't "
                "save or restore it",
                {"pid": str(pid)},
            )
        other = self.of(workload.workload_id)
        if other is not None:
            raise OperationError(
                errors_pb2.ERROR_REASON_ALREADY_REGISTERED,
                f"workload {workload.name} already has the application "
                f"{other.facts.kernel_id}: serve one application per workload, in its first process "
                "for example",
                {"pid": str(self._peers[workload.workload_id].identity.pid)},
            )
        self._count_registration(workload)
        return workload

    def _count_registration(self, workload: Workload) -> None:
        """Counts a registration of a workload's application, by the generic cell rate algorithm.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES: the workload has recently had too many.
        """
        now_s = trio.current_time()
        self._due_s = {workload_id: due_s for workload_id, due_s in self._due_s.items() if due_s > now_s}
        due_s = self._due_s.get(workload.workload_id, now_s)
        wait_s = due_s - now_s - (REGISTRATIONS_BURST - 1) * REGISTRATION_INTERVAL_S
        if wait_s > 0:
            retry_after_s = str(math.ceil(wait_s))
            raise OperationError(
                errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
                f"applications of workload {workload.name} have registered too often: a workload has "
                f"{REGISTRATIONS_BURST} registrations at once, and one per {REGISTRATION_INTERVAL_S:g} s: "
                f"try again in {retry_after_s} s",
                {"bound": "registrations", "retry_after_s": retry_after_s},
            )
        self._due_s[workload.workload_id] = due_s + REGISTRATION_INTERVAL_S


async def _cancel_at_end(workload: Workload, scope: trio.CancelScope) -> None:
    await workload.ended.wait()
    scope.cancel()


async def _receive_hello(session: ApplicationStream) -> KernelHello:
    with trio.move_on_after(HELLO_TIMEOUT_S):
        frame = await session.receive()
        if frame.WhichOneof("frame") == "hello":
            return frame.hello
    raise invalid("hello", f"the first message of a stream must be hello, within {HELLO_TIMEOUT_S:g} s")


def _check_facts(hello: KernelHello) -> None:
    if hello.kernel.version < 0:
        raise invalid("kernel.version", f"kernel.version {hello.kernel.version} is negative: give 0 or more")
    for field, value in (("kernel.kernel_id", hello.kernel.kernel_id), ("kernel.kind", hello.kernel.kind)):
        if len(value) > NAME_LIMIT or not _NAME.fullmatch(value):
            raise invalid(
                field,
                f"invalid {value[:NAME_LIMIT]!r} {field}: use at most {NAME_LIMIT} letters, "
                "digits, '_', '.', '/', ':' and '-', and start with a letter or digit",
            )
