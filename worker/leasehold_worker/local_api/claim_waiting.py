"""The wait of local claims in the queue: its checks, its reports, and its end."""

import logging
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, final

import trio
from leasehold.local.v1 import local_service_pb2
from leasehold.local.v1.local_service_pb2 import ClaimOpen, ClaimResponse
from leasehold.v1 import errors_pb2, workload_pb2

from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import lineage
from leasehold_worker.leasing.allocation import Allocation, AllocRequest, Resources
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.local_api.claim_rules import (
    NAME,
    TEXT_LIMIT,
    WAIT_LIMIT_S,
    check_claim_hooks,
    check_duration,
    check_helper,
    check_priority,
    check_sizes,
)
from leasehold_worker.local_api.claim_stream import ClaimStream
from leasehold_worker.local_api.start_allowance import STARTS_BURST, STARTS_PER_S, StartAllowance, units
from leasehold_worker.overlap import both
from leasehold_worker.timestamps import seconds, timestamp
from leasehold_worker.workloads.eviction import resolve
from leasehold_worker.workloads.foreign_processes import ForeignWatch, check_living, owner, read_mark
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED
from leasehold_worker.workloads.workload import CLAIM, EXEC, Workload

logger = logging.getLogger(__name__)

COALESCE_S: Final = 0.05
"""Shortest time between two reports of a claim's place in the queue."""


CLAIMED_LIMIT: Final = 512
"""Granted claims that have not ended: one frame of hello reports all of them."""

USER_CLAIMED_LIMIT: Final = 256
"""Granted claims of one user other than root and the worker's."""


@final
class ClaimWaiting:
    """The waiting claims of one host.

    Args:
        pool: The GPUs.
        resources: Resources of the host.
        workloads: The registry.
        foreign: Finds other processes on the GPUs.
        user_priority_limit: The highest priority of users other than root and the worker's.
    """

    def __init__(
        self,
        pool: GpuPool,
        resources: Resources,
        workloads: Workloads,
        foreign: ForeignWatch,
        user_priority_limit: int = 0,
    ) -> None:
        self._user_priority_limit = user_priority_limit
        self._pool = pool
        self._resources = resources
        self._workloads = workloads
        self._foreign = foreign
        self._names: dict[str, str] = {}
        """Names of waiting claims, by workload: no other workload may use them."""
        self._waiting: dict[str, ClaimStream] = {}
        self._starts = StartAllowance(STARTS_BURST, STARTS_PER_S)

    def count_start(self, peer: Peer, record_bytes: int) -> None:
        """Counts a workload that a process begins.

        Args:
            peer: The process.
            record_bytes: Size of the workload's record.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES: its user has begun too many.
        """
        self._starts.take(peer, units(record_bytes), trio.current_time())

    @asynccontextmanager
    async def entered(self, session: ClaimStream, workload_id: str, wanted: ClaimOpen) -> AsyncIterator[str]:
        """Checks a claim and reserves a unique name while it waits.

        The search for foreign processes, which a grant needs, runs beside the last check.

        Yields:
            The name.

        Raises:
            OperationError: The claim is invalid, or its process or name is in use.
        """
        session.marked_id = await read_mark(session.peer.identity.pid)
        name = self._new_name(wanted.name, workload_id)
        self._check(session.peer, wanted)
        self._names[workload_id] = name
        self._waiting[workload_id] = session
        try:
            await self.check_unowned(session)
            await both(
                partial(self._check_descendants, session.peer),
                partial(self._foreign.look, self._workloads),
            )
            yield name
        finally:
            del self._names[workload_id], self._waiting[workload_id]

    def waiting(self) -> list[local_service_pb2.WaitingClaim]:
        """The waiting claims, including those of the coordinator's commands, in queue order."""
        pool, resources = self._pool, self._resources
        return [
            local_service_pb2.WaitingClaim(
                name=self._names.get(waiter.workload_id, waiter.workload_id),
                pid=session.peer.identity.pid if session else 0,
                user=session.peer.user if session else "",
                gpu_count=waiter.request.count,
                priority=waiter.priority,
                helper=waiter.helper,
                since=timestamp(waiter.since),
                reason=resources.what_lacks(
                    resources.waits_for(waiter.workload_id) or AllocRequest(waiter.request)
                ),
            )
            for waiter in pool.waiting
            for session in (self._waiting.get(waiter.workload_id),)
        ]

    def _new_name(self, wanted: str, workload_id: str) -> str:
        if not wanted:
            return workload_id
        if not NAME.fullmatch(wanted):
            raise invalid(
                "name",
                f"invalid name {wanted[:TEXT_LIMIT]!r}: start with a letter, then use "
                "letters, digits, '-', '_' or '.', 63 in all",
            )
        living = (workload.name for workload in self._workloads.all() if workload.state not in ENDED)
        if wanted in living or wanted in self._names.values():
            raise OperationError(
                errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
                f"a workload named {wanted!r} has not ended: choose another name",
                {"field": "name"},
            )
        return wanted

    def _check(self, peer: Peer, wanted: ClaimOpen) -> None:
        check_claim_hooks(wanted.spec.hooks, peer)
        check_priority(wanted.spec, peer, self._user_priority_limit)
        resolve(None, wanted.spec.eviction)
        if wanted.HasField("wait"):
            check_duration("wait", wanted.wait, WAIT_LIMIT_S)
        check_helper(wanted.spec.helper)
        check_sizes(wanted.spec, len(self._pool.slots.gpus))
        self._check_number(peer)
        self._starts.check(peer, units(0), trio.current_time())
        if any(session.peer.identity == peer.identity for session in self._waiting.values()):
            raise _registered(peer, "already has a waiting claim: make one claim at a time")
        if _is_below(os.getpid(), peer):
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"process {peer.identity.pid} can't claim, since the worker is among its "
                "descendants and would be suspended with it: start the worker elsewhere",
                {"pid": str(peer.identity.pid)},
            )

    def _check_number(self, peer: Peer) -> None:
        """Refuses a claim beyond the limit: claims without GPUs are as cheap as processes."""
        granted = [each for each in self._workloads.all() if each.state not in ENDED]
        claimed = [each for each in granted if each.origin in (CLAIM, EXEC)]
        mine = sum(each.uid == peer.uid for each in claimed)
        if len(claimed) >= CLAIMED_LIMIT:
            why = f"this worker has {len(claimed)} claims, which is its limit"
        elif not peer.is_trusted and mine >= USER_CLAIMED_LIMIT:
            why = f"user {peer.user} has {mine} claims, the limit of a user"
        else:
            return
        raise OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES, f"{why}: wait until one of them ends"
        )

    async def check_unowned(self, session: ClaimStream) -> None:
        """Refuses a process that belongs to a workload, or that is an ancestor of a workload's first process.

        It reads only ancestors, so its cost does not depend on the number of descendants.

        Raises:
            OperationError: ALREADY_REGISTERED.
        """
        check = partial(_check_unrelated, session.peer, session.marked_id)
        await check_living(self._workloads, session.peer.identity.pid, check)

    async def _check_descendants(self, peer: Peer) -> None:
        """Refuses a process with descendants that belong to a workload, even by their mark alone.

        Raises:
            OperationError: ALREADY_REGISTERED.
        """
        workloads = self._workloads.all()
        pid = peer.identity.pid
        try:
            found = await read_process(pid, partial(_owned_below, peer, workloads))
        except OperationError:
            logger.warning("process %d makes a claim, and some of its descendants can't be read", pid)
            return
        if found is not None:
            raise _has_below(peer, *found)

    async def wait_turn(
        self, session: ClaimStream, workload_id: str, name: str, wanted: ClaimOpen
    ) -> Allocation:
        """Waits for the requested resources, and reports the place in the queue.

        Raises:
            OperationError: The resources are not available, or not in time.
        """
        spec = wanted.spec
        request = AllocRequest.of(spec.resources, self._workloads.last_gpus(name))
        wait_s = seconds(wanted.wait) if wanted.HasField("wait") else float("inf")
        request.validate()
        if request.gpus.count:
            self._pool.slots.check_possible(request.gpus)
        if wait_s <= 0:
            return self._take_at_once(workload_id, request, spec)
        granted: list[Allocation] = []
        refusals: list[OperationError] = []
        # A nursery raises Cancelled in a group: an exception returns everything that was granted.
        try:
            with trio.move_on_after(wait_s):
                async with trio.open_nursery() as nursery:
                    if request.gpus.count:
                        nursery.start_soon(self._tell_place, session, workload_id, request)
                    try:
                        granted.append(
                            await self._resources.claim(
                                workload_id, request, priority=spec.priority, helper=spec.HasField("helper")
                            )
                        )
                    except OperationError as refused:
                        refusals.append(refused)
                    nursery.cancel_scope.cancel()
        except BaseException:
            for allocation in granted:
                allocation.release()
            raise
        if refusals:
            raise refusals[0]
        if granted:
            return granted[0]
        refusal = self._resources.why_not(request)
        raise OperationError(refusal.reason, f"not granted in time: {refusal.message}", refusal.metadata)

    def _take_at_once(
        self, workload_id: str, request: AllocRequest, spec: workload_pb2.WorkloadSpec
    ) -> Allocation:
        """Allocates immediately if that overtakes no waiter of higher priority.

        Raises:
            OperationError: The resources are not available now.
        """
        pool = self._pool
        if spec.HasField("helper") and request.gpus.count and pool.waiting:
            raise self._resources.why_not(request)
        return self._resources.alloc(workload_id, request, live=True, priority=spec.priority)

    async def _tell_place(self, session: ClaimStream, workload_id: str, request: AllocRequest) -> None:
        told = None
        pool = self._pool
        while True:
            waiting = pool.waiting
            ids = [waiter.workload_id for waiter in waiting]
            if workload_id in ids:
                message = local_service_pb2.ClaimWaiting(
                    position=ids.index(workload_id) + 1,
                    pending_claimers=len(waiting),
                    reason=self._resources.what_lacks(request),
                )
                if message != told:
                    session.tell(ClaimResponse(waiting=message))
                    told = message
            await pool.slots.wait_changed()
            await trio.sleep(COALESCE_S)


def _check_unrelated(peer: Peer, marked_id: str, workloads: Collection[Workload]) -> None:
    """Refuses a process that is an ancestor or a descendant of a workload's first process."""
    holder = owner(peer.identity.pid, workloads, marked_id)
    if holder is not None:
        raise _registered(peer, f"already belongs to workload {holder.name}: it can't claim for itself")
    for workload in workloads:
        if _is_below(workload.root.pid, peer):
            raise _has_below(peer, workload.root.pid, workload)


def _is_below(pid: int, peer: Peer) -> bool:
    return any(identity == peer.identity for identity, _ in lineage(pid))


def _owned_below(peer: Peer, workloads: Collection[Workload]) -> tuple[int, Workload] | None:
    """A descendant that belongs to a workload, with the workload. It may block: call it in a thread."""
    for pid in sorted(identity.pid for identity in process_tree(peer.identity)):
        holder = owner(pid, workloads)
        if holder is not None:
            return pid, holder
    return None


def _has_below(peer: Peer, pid: int, workload: Workload) -> OperationError:
    return _registered(
        peer, f"has process {pid} of workload {workload.name} among its descendants: it can't claim that too"
    )


def _registered(peer: Peer, how: str) -> OperationError:
    pid = peer.identity.pid
    return OperationError(
        errors_pb2.ERROR_REASON_ALREADY_REGISTERED, f"process {pid} {how}", {"pid": str(pid)}
    )
