"""Claims of local processes, from the wait in the queue to the end of the lease. On trio's side.

A claiming process becomes a workload like any other. Its lease ends with the process, and for a claim with a
stream also with the stream. A restart of the worker breaks all streams. A process that reconnects in time
keeps its lease.
"""

import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, final

import trio
from leasehold.local.v1 import local_service_pb2
from leasehold.local.v1.local_service_pb2 import ClaimOpen, ClaimResponse
from leasehold.v1 import errors_pb2, operation_pb2
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.workload_pb2 import WorkloadOrigin, WorkloadSpec

from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import Journal
from leasehold_worker.commands.states import SUCCEEDED
from leasehold_worker.errors import OperationError, defect, invalid
from leasehold_worker.files.workload_files import OUTPUT_FILE
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.processes import is_alive
from leasehold_worker.leasing.allocation import Allocation
from leasehold_worker.leasing.messages import lease_message
from leasehold_worker.local_api.claim_stream import ClaimStream
from leasehold_worker.local_api.claim_waiting import ClaimWaiting
from leasehold_worker.timestamps import duration
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.messages import workload_message
from leasehold_worker.workloads.program_start import ProgramStart
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED, RUNNING, state_text
from leasehold_worker.workloads.workload import CLAIM, EXEC, WORKLOAD_ID_VARIABLE, Workload, told_arguments

logger = logging.getLogger(__name__)

RESUME_TIMEOUT_S: Final = 30.0
"""Time for claiming processes to reconnect after a start of the worker."""

GIVE_BACK_AGAIN_S: Final = 1.0
JOURNAL_TIMEOUT_S: Final = 10.0


@final
class LocalClaims:
    """The claims of one host.

    Args:
        workloads: The registry.
        register: Adds a workload to the registry, and monitors its end.
        programs: The environment of programs with GPUs.
        host_shares: The host resources of workloads.
        nursery: Runs the tasks of streams.
        commands: Releases workloads.
        journal: Stores a grant before it is reported.
        claim_waiting: The waiting claims.
    """

    def __init__(
        self,
        workloads: Workloads,
        register: Callable[[Workload], None],
        programs: ProgramStart,
        host_shares: HostShares,
        nursery: trio.Nursery,
        commands: Commands,
        journal: Journal,
        claim_waiting: ClaimWaiting,
    ) -> None:
        self._workloads = workloads
        self._register_workload = register
        self._programs = programs
        self._host_shares = host_shares
        self._nursery = nursery
        self._claim_waiting = claim_waiting
        self._commands = commands
        self._journal = journal
        self._sessions: dict[str, ClaimStream] = {}
        """Open streams by workload."""
        self._inherited: set[str] = set()
        """Workloads of an earlier run of the worker whose grant may not have been delivered."""
        self._yields: dict[str, float] = {}
        """Deadlines of the standing requests to yield, on trio's clock, by workload."""
        self._suspended = False

    def begin(self, session: ClaimStream) -> None:
        """Begins to serve a stream."""
        self._nursery.start_soon(self._serve, session)

    def suspend_streams(self) -> None:
        """From now on, the end of a stream ends no lease: the worker stops, and claims resume later."""
        self._suspended = True

    def expect_resumption(self) -> None:
        """After a start, ends the leases of claims that do not reconnect in time."""
        for workload in self._workloads.all():
            if workload.origin in (CLAIM, EXEC) and workload.state not in ENDED:
                self._inherited.add(workload.workload_id)
                self._nursery.start_soon(self._expect, workload)

    async def _expect(self, workload: Workload) -> None:
        await trio.sleep(RESUME_TIMEOUT_S)
        self._inherited.discard(workload.workload_id)
        if workload.origin == CLAIM and workload.workload_id not in self._sessions:
            await self._give_back(workload)

    def ask_to_yield(self, workload_id: str, grace_s: float) -> None:
        """Asks a preemptible workload with a stream, or with one that it resumes, to release its GPUs."""
        self._yields[workload_id] = trio.current_time() + grace_s
        if session := self._sessions.get(workload_id):
            self._tell_yield(session, workload_id)

    def _tell_yield(self, session: ClaimStream, workload_id: str) -> None:
        """Tells a request to yield that still stands."""
        if (deadline := self._yields.get(workload_id)) is not None:
            request = local_service_pb2.ClaimYield(grace=duration(max(0.0, deadline - trio.current_time())))
            session.tell(ClaimResponse(yield_request=request))

    def withdraw_yield(self, workload: Workload) -> None:
        """Tells a workload with a stream that it keeps its GPUs for now. Its state is no news otherwise."""
        self._yields.pop(workload.workload_id, None)
        session = self._sessions.get(workload.workload_id)
        if session is not None and workload.state == RUNNING:
            session.tell(ClaimResponse(changed=_changed(workload)))

    async def _serve(self, session: ClaimStream) -> None:
        with session.scope:
            try:
                await self._answer(session)
            except OperationError as error:
                session.tell(error)
            except Exception:
                logger.exception("a claim failed because of a defect")
                session.tell(defect())
            session.tell(None)

    async def _answer(self, session: ClaimStream) -> None:
        match session.request.WhichOneof("kind"):
            case "open":
                await self._open(session, session.request.open)
            case "resume":
                await self._resume(session, session.request.resume.workload_id)
            case None:
                raise invalid("kind", "the first message of a claim must be open or resume: set one of them")

    async def _open(self, session: ClaimStream, wanted: ClaimOpen) -> None:
        untold = self._untold(session.peer, wanted)
        if untold is not None:
            await self._hold(session, untold, resumed=True)
            return
        workload_id = f"w-{uuid.uuid4().hex[:12]}"
        async with self._claim_waiting.entered(session, workload_id, wanted) as name:
            allocation = await self._claim_waiting.wait_turn(session, workload_id, name, wanted)
            try:
                await self._claim_waiting.check_unowned(session)
            except BaseException:
                allocation.release()
                raise
            workload = self._register(session, workload_id, name, wanted, allocation)
        await self._hold(session, workload)

    def _untold(self, peer: Peer, wanted: ClaimOpen) -> Workload | None:
        """The undelivered grant of an earlier run of the worker, for the same claim."""
        origin, spec = _registration(wanted)
        for workload in self._workloads.all():
            same = (workload.root, workload.origin, workload.spec) == (peer.identity, origin, spec)
            named = wanted.name in ("", workload.name)
            if same and named and workload.state not in ENDED and workload.workload_id in self._inherited:
                self._inherited.remove(workload.workload_id)
                return workload
        return None

    def _register(
        self, session: ClaimStream, workload_id: str, name: str, wanted: ClaimOpen, allocation: Allocation
    ) -> Workload:
        """Makes the process a workload, in one step after the last check of its ancestors.

        Raises:
            OperationError: UNKNOWN_PROCESS, it has ended meanwhile, or INSUFFICIENT_RESOURCES, its user has
                begun too many workloads. Nothing is held after an error.
        """
        peer = session.peer
        try:
            if not is_alive(peer.identity):
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNKNOWN_PROCESS, f"process {peer.identity.pid} has ended"
                )
            origin, spec = _registration(wanted)
            workload = Workload(
                workload_id,
                name,
                spec,
                peer.identity,
                self._workloads.folder(workload_id) / OUTPUT_FILE,
                datetime.now(UTC),
                allocation.lease,
                origin=origin,
                user=peer.user,
                uid=peer.uid,
                mark=f"{WORKLOAD_ID_VARIABLE}={workload_id}" if origin == EXEC else "",
                host=allocation.host,
            )
            self._claim_waiting.count_start(peer, workload_message(workload, "").ByteSize())
            if origin == EXEC:  # a process that claims for itself is not moved
                self._host_shares.enforce(workload)
        except BaseException:
            allocation.release()
            raise
        allocation.hand_over_lease()
        self._register_workload(workload)
        return workload

    async def _hold(self, session: ClaimStream, workload: Workload, *, resumed: bool = False) -> None:
        """Delivers the grant once it is on disk, and keeps the lease as long as the stream."""
        by_stream = workload.origin == CLAIM
        if by_stream:
            self._sessions[workload.workload_id] = session
        try:
            await self._tell_granted(session, workload)
            if by_stream:
                await self._tell_changes(session, workload, resumed=resumed)
        finally:
            if self._sessions.get(workload.workload_id) is session:
                del self._sessions[workload.workload_id]
            if by_stream and not self._suspended and workload.state not in ENDED:
                self._nursery.start_soon(self._give_back, workload)

    async def _tell_granted(self, session: ClaimStream, workload: Workload) -> None:
        with trio.move_on_after(JOURNAL_TIMEOUT_S) as scope:
            await self._journal.wait_settled()
        if scope.cancelled_caught:
            self._nursery.start_soon(self._give_back, workload)
            raise OperationError(
                errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
                "the grant can't be stored: check the disk of the worker's state directory",
            )
        lease = workload.lease
        granted = local_service_pb2.ClaimGranted(
            workload_id=workload.workload_id,
            name=workload.name,
            lease=lease_message(lease) if lease else None,
            environment=self._programs.variables(workload.workload_id, workload.name, lease),
        )
        session.tell(ClaimResponse(granted=granted))

    async def _tell_changes(self, session: ClaimStream, workload: Workload, *, resumed: bool) -> None:
        told = None if resumed else (workload.state, workload.lease)
        while workload.state not in ENDED:
            now = (workload.state, workload.lease)
            if now != told:
                session.tell(ClaimResponse(changed=_changed(workload)))
                self._tell_yield(session, workload.workload_id)  # the change looked like a withdrawal
                told = now
            await self._workloads.wait_changed()
        why = f"the workload is {state_text(workload.state)}"
        session.tell(ClaimResponse(ended=local_service_pb2.ClaimEnded(reason=why)))

    async def _resume(self, session: ClaimStream, workload_id: str) -> None:
        workload = self._workloads.get(workload_id)
        if workload.origin != CLAIM or workload.root != session.peer.identity:
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED, f"claim {workload_id} does not belong to this process"
            )
        if workload.state in ENDED:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD, f"claim {workload_id} has ended: make a new claim"
            )
        self._inherited.discard(workload_id)
        older = self._sessions.pop(workload_id, None)
        if older is not None:
            older.tell(
                ClaimResponse(ended=local_service_pb2.ClaimEnded(reason="the claim moved to another stream"))
            )
            older.tell(None)
        await self._hold(session, workload, resumed=True)

    async def _give_back(self, workload: Workload) -> None:
        """Releases a workload, after any running operation and its restore."""
        while workload.state not in ENDED and workload.workload_id not in self._sessions:
            if workload.state != RUNNING:
                await self._workloads.wait_changed()
                continue
            operation = Operation(release=operation_pb2.ReleaseOperation())
            outcome = await self._commands.carry_out(workload.workload_id, operation)
            if outcome.state == SUCCEEDED:
                return
            with trio.move_on_after(GIVE_BACK_AGAIN_S):
                await workload.ended.wait()


def _changed(workload: Workload) -> local_service_pb2.ClaimChanged:
    lease = lease_message(workload.lease) if workload.lease else None
    return local_service_pb2.ClaimChanged(state=workload.state, lease=lease)


def _registration(wanted: ClaimOpen) -> tuple[WorkloadOrigin.ValueType, WorkloadSpec]:
    """The workload's spec from a claim, for a program that the worker does not start."""
    said = wanted.spec
    spec = WorkloadSpec(
        arguments=told_arguments(said.arguments),
        priority=said.priority if said.HasField("priority") else None,
        eviction=said.eviction if said.HasField("eviction") else None,
        hooks=said.hooks,
        member_order=said.member_order,
        helper=said.helper if said.HasField("helper") else None,
    )
    if said.HasField("resources"):
        spec.resources.CopyFrom(said.resources)
    return EXEC if wanted.hold == local_service_pb2.CLAIM_HOLD_PROCESS else CLAIM, spec
