"""Claims of processes of this host: from the wait for their turn to the end of their lease. On trio's side.

Who claims becomes a workload like any other. Its lease ends with its process, and for one that holds on by a
stream also with that. A restart of the worker breaks all streams; whoever comes back in time goes on, and
the others' leases end.
"""

import logging
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, final

import trio
from leasehold.v1 import command_pb2, errors_pb2, local_pb2, workload_pb2
from leasehold.v1.command_pb2 import Operation
from leasehold.v1.local_pb2 import ClaimOpen, ClaimRequest, ClaimResponse
from leasehold.v1.workload_pb2 import WorkloadOrigin, WorkloadSpec

from leasehold_worker import wire
from leasehold_worker.command_states import SUCCEEDED
from leasehold_worker.commands import Commands
from leasehold_worker.errors import OperationError
from leasehold_worker.foreign import owner
from leasehold_worker.journal import Journal
from leasehold_worker.leases import Lease
from leasehold_worker.local_socket import Peer
from leasehold_worker.parts import Parts
from leasehold_worker.preconditions import invalid, require_known_features
from leasehold_worker.processes import is_alive
from leasehold_worker.resources import Allocation, AllocRequest
from leasehold_worker.workloads import (
    CLAIM,
    ENDED,
    EXEC,
    OUTPUT_FILE,
    RUNNING,
    WORKLOAD_ID_VARIABLE,
    Workload,
    told_arguments,
)

logger = logging.getLogger(__name__)

RESUME_TIMEOUT_S: Final = 30.0
"""How long after a start of the worker the holder of a claim may take to come back."""

GIVE_BACK_AGAIN_S: Final = 1.0
JOURNAL_TIMEOUT_S: Final = 10.0
COALESCE_S: Final = 0.05
"""How long a place in the queue may have changed before it is told."""

LAST_GPUS_LIMIT: Final = 256
"""Names of which it is known on which GPUs they were last."""

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")


@final
class Session:
    """One stream of a claimant.

    Args:
        peer: Who it is.
        request: What it said.
        tell: Sends a response, and ends the stream by None or with a refusal. From any thread.
    """

    def __init__(
        self,
        peer: Peer,
        request: ClaimRequest,
        tell: Callable[[ClaimResponse | OperationError | None], None],
    ) -> None:
        self.peer = peer
        self.request = request
        self.tell = tell
        self.scope = trio.CancelScope()

    def close(self) -> None:
        """The claimant is gone. On trio's thread."""
        self.scope.cancel()


@final
class LocalClaims:
    """The claims of one host.

    Args:
        parts: What works on the GPUs.
        commands: Lets workloads go.
        journal: A grant is told once it is on disk.
        worker_id: In workloads that are told.
    """

    def __init__(self, parts: Parts, commands: Commands, journal: Journal, worker_id: str) -> None:
        self._parts = parts
        self._commands = commands
        self._journal = journal
        self._worker_id = worker_id
        self._sessions: dict[str, Session] = {}
        """By workload: who holds on by a stream."""
        self._names: dict[str, str] = {}
        """By workload that is not granted yet: its name, which nobody else may take."""
        self._waiting: dict[str, Session] = {}
        self._inherited: set[str] = set()
        """Workloads of an earlier start of the worker, which may not have told their grant any more."""
        self._last_gpus: dict[str, tuple[str, ...]] = {}
        self._suspended = False

    def begin(self, session: Session) -> None:
        """Begins to serve a stream."""
        self._parts.nursery.start_soon(self._serve, session)

    def suspend_streams(self) -> None:
        """From now on, the end of a stream ends no lease: the worker stops, and its next start goes on."""
        self._suspended = True

    def expect_resumption(self) -> None:
        """After a start: ends the leases of those holders of claims that don't come back in time."""
        for workload in self._parts.workloads.all():
            if workload.origin in (CLAIM, EXEC) and workload.state not in ENDED:
                self._inherited.add(workload.workload_id)
            if workload.origin == CLAIM and workload.state not in ENDED:
                self._parts.nursery.start_soon(self._expect, workload)

    async def _expect(self, workload: Workload) -> None:
        await trio.sleep(RESUME_TIMEOUT_S)
        if workload.workload_id not in self._sessions:
            await self._give_back(workload)

    def ask_to_yield(self, workload_id: str, grace_s: float) -> None:
        """Tells a helper that holds on by a stream that somebody waits for its GPUs."""
        session = self._sessions.get(workload_id)
        if session is not None:
            request = local_pb2.ClaimYield(grace=wire.duration(grace_s))
            session.tell(ClaimResponse(yield_request=request))

    async def _serve(self, session: Session) -> None:
        with session.scope:
            try:
                await self._answer(session)
            except OperationError as error:
                session.tell(error)
            except Exception:
                logger.exception("a claim failed by a defect")
                session.tell(
                    OperationError(
                        errors_pb2.ERROR_REASON_INTERNAL, "a defect of Leasehold: the worker's log says more"
                    )
                )
            session.tell(None)

    async def _answer(self, session: Session) -> None:
        match session.request.WhichOneof("kind"):
            case "open":
                await self._open(session, session.request.open)
            case "resume":
                await self._resume(session, session.request.resume.workload_id)
            case None:
                raise invalid("kind", "a claim says what it wants, or which one goes on: set open or resume")

    async def _open(self, session: Session, wanted: ClaimOpen) -> None:
        untold = self._untold(session.peer, wanted)
        if untold is not None:
            await self._hold(session, untold, resumed=True)
            return
        workload_id = f"w-{uuid.uuid4().hex[:12]}"
        name = self._new_name(wanted.name, workload_id)
        self._check(session.peer, wanted)
        self._names[workload_id] = name
        self._waiting[workload_id] = session
        try:
            allocation = await self._wait_turn(session, workload_id, name, wanted)
            workload = self._register(session.peer, workload_id, name, wanted, allocation)
        finally:
            del self._names[workload_id], self._waiting[workload_id]
        await self._hold(session, workload)

    def _untold(self, peer: Peer, wanted: ClaimOpen) -> Workload | None:
        """What an earlier start of the worker granted to this very claim, which is made anew now."""
        origin, spec = _registration(wanted)
        for workload in self._parts.workloads.all():
            same = (workload.root, workload.origin, workload.spec) == (peer.identity, origin, spec)
            named = wanted.name in ("", workload.name)
            if same and named and workload.state not in ENDED and workload.workload_id in self._inherited:
                self._inherited.remove(workload.workload_id)
                return workload
        return None

    def _new_name(self, wanted: str, workload_id: str) -> str:
        if not wanted:
            return workload_id
        if not _NAME.fullmatch(wanted):
            raise invalid(
                "name",
                f"{wanted!r} is no name: take a letter, then letters, digits, '-', '_' or '.', 63 in all",
            )
        living = (workload.name for workload in self._parts.workloads.all() if workload.state not in ENDED)
        if wanted in living or wanted in self._names.values():
            raise OperationError(
                errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
                f"a workload named {wanted!r} has not ended: choose another name",
                {"field": "name"},
            )
        return wanted

    def _check(self, peer: Peer, wanted: ClaimOpen) -> None:
        require_known_features(wanted.spec)
        if wanted.spec.helper.process_strategy not in (
            workload_pb2.PROCESS_STRATEGY_UNSPECIFIED,
            workload_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
            workload_pb2.PROCESS_STRATEGY_STOP,
        ):
            raise invalid("helper", "a helper is suspended or stopped: choose cuda_suspend or stop")
        if any(session.peer.identity == peer.identity for session in self._waiting.values()):
            raise _registered(peer, "waits for a claim already: one at a time")
        self._check_unowned(peer)

    def _check_unowned(self, peer: Peer) -> None:
        holder = owner(peer.identity.pid, self._parts.workloads.all())
        if holder is not None:
            raise _registered(peer, f"belongs to workload {holder.name} already: it can't claim for itself")

    async def _wait_turn(
        self, session: Session, workload_id: str, name: str, wanted: ClaimOpen
    ) -> Allocation:
        """Waits for what is wanted, and tells how it stands meanwhile.

        Raises:
            OperationError: It can't be had, or not in time.
        """
        spec = wanted.spec
        request = AllocRequest.of(spec.resources, self._last_gpus.get(name, ()))
        wait_s = wanted.wait.ToTimedelta().total_seconds() if wanted.HasField("wait") else float("inf")
        request.validate()
        if request.gpus.count:
            self._parts.pool.check_possible(request.gpus)
        await self._parts.foreign.look(self._parts.workloads)
        if wait_s <= 0:
            return self._take_at_once(workload_id, request, spec)
        granted: list[Allocation] = []
        refusals: list[OperationError] = []
        try:
            with trio.move_on_after(wait_s):
                async with trio.open_nursery() as nursery:
                    if request.gpus.count:
                        nursery.start_soon(self._tell_place, session, workload_id, request)
                    try:
                        granted.append(
                            await self._parts.resources.claim(
                                workload_id, request, priority=spec.priority, helper=spec.HasField("helper")
                            )
                        )
                    except OperationError as refused:
                        refusals.append(refused)
                    nursery.cancel_scope.cancel()
        except trio.Cancelled:
            for allocation in granted:
                allocation.release()
            raise
        if refusals:
            raise refusals[0]
        if granted:
            return granted[0]
        refusal = self._parts.pool.why_not(request.gpus)
        raise OperationError(refusal.reason, f"after {wait_s:g} s: {refusal.message}", refusal.metadata)

    def _take_at_once(
        self, workload_id: str, request: AllocRequest, spec: workload_pb2.WorkloadSpec
    ) -> Allocation:
        """Takes what is there, and passes nobody who waits and goes first.

        Raises:
            OperationError: It can't be had now.
        """
        pool = self._parts.pool
        if spec.HasField("helper") and request.gpus.count and pool.waiting:
            raise pool.why_not(request.gpus)
        return self._parts.resources.alloc(workload_id, request, live=True, priority=spec.priority)

    async def _tell_place(self, session: Session, workload_id: str, request: AllocRequest) -> None:
        told = None
        pool = self._parts.pool
        while True:
            waiting = pool.waiting
            ids = [waiter.workload_id for waiter in waiting]
            if workload_id in ids:
                message = local_pb2.ClaimWaiting(
                    position=ids.index(workload_id) + 1,
                    pending_claimers=len(waiting),
                    reason=pool.what_lacks(request.gpus),
                )
                if message != told:
                    session.tell(ClaimResponse(waiting=message))
                    told = message
            await pool.wait_changed()
            await trio.sleep(COALESCE_S)

    def _register(
        self, peer: Peer, workload_id: str, name: str, wanted: ClaimOpen, allocation: Allocation
    ) -> Workload:
        """Makes the claimant a workload, in one step with its grant.

        Raises:
            OperationError: UNKNOWN_PROCESS, it has ended meanwhile, or ALREADY_REGISTERED, it was adopted;
                nothing is held.
        """
        try:
            if not is_alive(peer.identity):
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNKNOWN_PROCESS, f"process {peer.identity.pid} has ended"
                )
            self._check_unowned(peer)
        except OperationError:
            allocation.release()
            raise
        origin, spec = _registration(wanted)
        lease = allocation.hand_over_lease()
        workload = Workload(
            workload_id,
            name,
            spec,
            peer.identity,
            self._parts.workloads.folder(workload_id) / OUTPUT_FILE,
            datetime.now(UTC),
            lease,
            origin=origin,
            user=peer.user,
            mark=f"{WORKLOAD_ID_VARIABLE}={workload_id}" if origin == EXEC else "",
            host=allocation.host,
        )
        self._remember(name, lease)
        self._limit(workload)
        self._parts.workloads.add(workload, self._parts.nursery)
        return workload

    def _limit(self, workload: Workload) -> None:
        """Has the kernel hold a program to its promise. A process that claims for itself is left as it is."""
        limits, promised = self._parts.workloads.limits, workload.spec.resources
        if workload.origin == EXEC:
            group = limits.create(workload.workload_id, promised.cpu_millicores, promised.memory_bytes)
            if group is not None:
                limits.add(group, workload.root.pid)

    def _remember(self, name: str, lease: Lease | None) -> None:
        self._last_gpus.pop(name, None)
        if lease is not None:
            self._last_gpus[name] = lease.gpu_uuids
        if len(self._last_gpus) > LAST_GPUS_LIMIT:
            del self._last_gpus[next(iter(self._last_gpus))]

    async def _hold(self, session: Session, workload: Workload, *, resumed: bool = False) -> None:
        """Tells of the grant once it is on disk, and holds on for the stream."""
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
                self._parts.nursery.start_soon(self._give_back, workload)

    async def _tell_granted(self, session: Session, workload: Workload) -> None:
        with trio.move_on_after(JOURNAL_TIMEOUT_S) as scope:
            await self._journal.wait_settled()
        if scope.cancelled_caught:
            self._parts.nursery.start_soon(self._give_back, workload)
            raise OperationError(
                errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
                "the grant can't be written down: look at the disk of the worker's state directory",
            )
        lease = workload.lease
        granted = local_pb2.ClaimGranted(
            workload_id=workload.workload_id,
            name=workload.name,
            lease=wire.lease(lease) if lease else None,
            environment=self._parts.workloads.variables(workload.workload_id, workload.name, lease),
        )
        session.tell(ClaimResponse(granted=granted))

    async def _tell_changes(self, session: Session, workload: Workload, *, resumed: bool) -> None:
        told = None if resumed else (workload.state, workload.lease)
        while workload.state not in ENDED:
            now = (workload.state, workload.lease)
            if now != told:
                lease = wire.lease(workload.lease) if workload.lease else None
                changed = local_pb2.ClaimChanged(state=workload.state, lease=lease)
                session.tell(ClaimResponse(changed=changed))
                told = now
            await self._parts.workloads.wait_changed()
        state = workload_pb2.WorkloadState.Name(workload.state).removeprefix("WORKLOAD_STATE_")
        session.tell(ClaimResponse(ended=local_pb2.ClaimEnded(reason=f"the workload is {state}")))

    async def _resume(self, session: Session, workload_id: str) -> None:
        workload = self._parts.workloads.get(workload_id)
        if workload.origin != CLAIM or workload.root != session.peer.identity:
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED, f"claim {workload_id} is not one of this process"
            )
        if workload.state in ENDED:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD, f"claim {workload_id} has ended: claim anew"
            )
        older = self._sessions.pop(workload_id, None)
        if older is not None:
            older.tell(ClaimResponse(ended=local_pb2.ClaimEnded(reason="it goes on by another stream")))
            older.tell(None)
        await self._hold(session, workload, resumed=True)

    async def _give_back(self, workload: Workload) -> None:
        """Lets a workload go. While something is done with it, or it is parked, that has to wait."""
        while workload.state not in ENDED and workload.workload_id not in self._sessions:
            if workload.state != RUNNING:
                await self._parts.workloads.wait_changed()
                continue
            operation = Operation(release=command_pb2.ReleaseOperation())
            outcome = await self._commands.carry_out(workload.workload_id, operation)
            if outcome.state == SUCCEEDED:
                return
            with trio.move_on_after(GIVE_BACK_AGAIN_S):
                await workload.ended.wait()

    def list(self) -> local_pb2.ListResponse:
        """The GPUs, the workloads and the claims that wait."""
        parts = self._parts
        return local_pb2.ListResponse(
            gpus=wire.gpu_leases(parts.pool.snapshot_leases().slots, {}),
            workloads=[
                wire.workload(workload, self._worker_id)
                for workload in parts.workloads.all()
                if workload.state not in ENDED
            ],
            waiting=[
                local_pb2.WaitingClaim(
                    name=self._names.get(waiter.workload_id, waiter.workload_id),
                    pid=session.peer.identity.pid if session else 0,
                    user=session.peer.user if session else "",
                    gpu_count=waiter.request.count,
                    priority=waiter.priority,
                    helper=waiter.helper,
                    since=wire.timestamp(waiter.since),
                    reason=parts.pool.what_lacks(waiter.request),
                )
                for waiter in parts.pool.waiting
                for session in (self._waiting.get(waiter.workload_id),)
            ],
            resources=parts.resources.fetch_machine_resources(),
            cordon=wire.cordon(parts.pool.worker_cordon),
        )

    async def release(self, peer: Peer, name: str) -> workload_pb2.Workload:
        """Lets a claim or an adopted process go.

        Args:
            peer: Who asks: its owner, the worker's user or root.
            name: Id or name of the workload, or id of its lease.

        Raises:
            OperationError: UNKNOWN_WORKLOAD, NOT_PERMITTED, or why it can't be let go.
        """
        workload = self._find(name)
        if not peer.is_trusted and peer.user != workload.user:
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"workload {workload.name} is of user {workload.user}: only that user, the worker's and root "
                "may release it",
            )
        operation = Operation(release=command_pb2.ReleaseOperation())
        outcome = await self._commands.carry_out(workload.workload_id, operation)
        if outcome.state != SUCCEEDED:
            error = outcome.error
            raise OperationError(error.reason, error.message, dict(error.metadata))
        return wire.workload(workload, self._worker_id)

    def _find(self, name: str) -> Workload:
        for workload in self._parts.workloads.all():
            ids = (workload.workload_id, workload.name, workload.lease.lease_id if workload.lease else "")
            if workload.state not in ENDED and name in ids:
                return workload
        raise OperationError(
            errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
            f"no workload of this host that has not ended has the id, the name or the lease {name!r}: "
            "`leasehold local leases` lists them",
        )


def _registration(wanted: ClaimOpen) -> tuple[WorkloadOrigin.ValueType, WorkloadSpec]:
    """What a claim is as a workload."""
    spec = WorkloadSpec()
    spec.CopyFrom(wanted.spec)
    spec.arguments[:] = told_arguments(wanted.spec.arguments)
    return EXEC if wanted.hold == local_pb2.CLAIM_HOLD_PROCESS else CLAIM, spec


def _registered(peer: Peer, how: str) -> OperationError:
    pid = peer.identity.pid
    return OperationError(
        errors_pb2.ERROR_REASON_ALREADY_REGISTERED, f"process {pid} {how}", {"pid": str(pid)}
    )
