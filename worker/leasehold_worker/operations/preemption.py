"""Preemptible workloads: they use GPUs that no claim needs, and release them for a claim.

A preemptible workload is asked first, by its stream or by its declared signal. After its grace it is
suspended or stopped, as declared. A suspended one is restored as soon as GPUs are free again. The module
reacts to the pool's events and polls nothing.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from typing import Final, final

import trio
from leasehold.v1 import eviction_pb2, operation_pb2
from leasehold.v1.operation_pb2 import Operation

from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.states import SUCCEEDED
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import send_signal
from leasehold_worker.leasing.claim_queue import Kept, Waiter, kept_with
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.leasing.host_reservations import NOTHING
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.timestamps import seconds
from leasehold_worker.workloads.eviction import CUDA_SUSPEND, is_weaker
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import PARKED, RUNNING
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S: Final = 10.0
GRACE_LIMIT_S: Final = 7 * 86_400.0
"""A week, as for the coordinator's requests."""

AGAIN_S: Final = 5.0
"""Wait before another attempt to suspend, stop or restore a preemptible workload."""


@dataclass(frozen=True, slots=True)
class HelperLease:
    """GPUs that a preemptible workload holds.

    Attributes:
        lease: Its lease.
        asked: Its release of the GPUs is under way.
        stubborn: The last attempt to preempt it failed, so it is asked after all others.
    """

    lease: Lease
    asked: bool = False
    stubborn: bool = False


def helpers_to_ask(pool: GpuPool, helpers: Sequence[HelperLease]) -> list[Lease]:
    """The leases of preemptible workloads that have to end for the waiting claims. The newest go first.

    A claim gets free GPUs, GPUs on their way, and then the fewest of the newest leases that suffice. A
    restore or remap makes a new lease, so the age of the workload does not count. If all leases together do
    not suffice, the claim gets none, and neither do later claims on the same GPUs. The same holds for a
    claim that waits for CPU time or memory, which preemptible workloads keep; later claims then get none of
    the GPUs reserved for it. A cordoned worker grants nothing, so it preempts nothing.
    """
    if pool.slots.worker_cordon is not None:
        return []
    claims = takewhile(lambda waiter: not waiter.helper, pool.waiting)
    return [lease for leases, _ in _shares(pool, helpers, claims) for lease in leases]


def helpers_would_do(pool: GpuPool, leases: Sequence[Lease], request: GpuRequest, priority: int) -> bool:
    """Whether preemptible workloads would be asked for a new claim, and would suffice.

    The claims ahead of the new one get free GPUs and those of preemptible workloads first.

    Args:
        pool: The GPUs.
        leases: The leases of preemptible workloads.
        request: The GPUs of the new claim.
        priority: The priority of the new claim.
    """
    if pool.slots.worker_cordon is not None or not leases:
        return False
    new = Waiter[Lease](
        "",
        request,
        priority,
        helper=False,
        host=NOTHING,
        has_host=lambda _: True,
        take_host=lambda _: True,
        since=datetime.now(UTC),
        number=sys.maxsize,
    )
    ahead = [waiter for waiter in pool.waiting if waiter.turn < new.turn]
    *_, (_, chosen) = _shares(pool, [HelperLease(lease) for lease in leases], [*ahead, new])
    return chosen is not None


def _shares(
    pool: GpuPool, helpers: Sequence[HelperLease], claims: Iterable[Waiter[Lease]]
) -> Iterator[tuple[list[Lease], tuple[str, ...] | None]]:
    """The leases that have to end for each claim, and the GPUs that the claim then gets. None: too few."""
    coming = {
        uuid for helper in helpers if helper.asked and not helper.stubborn for uuid in helper.lease.gpu_uuids
    }
    newest_first = sorted(helpers, key=lambda helper: (helper.stubborn, -helper.lease.fencing_token))
    unasked = [helper.lease for helper in newest_first if not helper.asked]
    taken: set[str] = set()
    kept = Kept()

    def gpus_for(request: GpuRequest, leases: Iterable[Lease]) -> tuple[str, ...] | None:
        """The GPUs that a claim would get if these leases ended too."""
        freed = coming.union(*(lease.gpu_uuids for lease in leases))
        return pool.slots.choose(request, freed - taken, taken)

    for waiter in claims:
        obtainable = pool.slots.obtainable(waiter.request)
        at_once = pool.slots.choose(waiter.request, (), kept.gpu_uuids)
        asks = at_once is None and waiter.has_host(kept.host)
        kept = kept_with(kept, waiter, at_once, obtainable)
        needed = _newest_needed(unasked, partial(gpus_for, waiter.request)) if asks else None
        chosen = None if needed is None else gpus_for(waiter.request, needed)
        if needed is None or chosen is None:
            taken |= obtainable if at_once is None else set(at_once)
            yield [], at_once
            continue
        coming |= {uuid for lease in needed for uuid in lease.gpu_uuids}
        unasked = [lease for lease in unasked if lease not in needed]
        taken |= set(chosen)
        yield needed, chosen


def _newest_needed(
    newest_first: Sequence[Lease], gpus_for: Callable[[Iterable[Lease]], tuple[str, ...] | None]
) -> list[Lease] | None:
    """The fewest newest leases that serve a claim. None: all together do not suffice."""
    for count in range(len(newest_first) + 1):
        needed = list(newest_first[:count])
        if gpus_for(needed) is not None:
            for lease in reversed(newest_first[:count]):
                others = [other for other in needed if other is not lease]
                if gpus_for(others) is not None:
                    needed = others
            return needed
    return None


def helper_policy(declared: eviction_pb2.EvictionPolicy) -> eviction_pb2.EvictionPolicy:
    """The policy that preempts a workload: CUDA suspend, or else the declared one."""
    allowed = declared.escalate_to and not is_weaker(declared.escalate_to, CUDA_SUSPEND)
    return eviction_pb2.EvictionPolicy(
        weight_strategy=declared.weight_strategy,
        process_strategy=CUDA_SUSPEND,
        escalate_to=declared.escalate_to if allowed else eviction_pb2.PROCESS_STRATEGY_UNSPECIFIED,
    )


def spare_gpus(pool: GpuPool) -> int:
    """The number of GPUs that preempted workloads may use again."""
    return 0 if pool.slots.worker_cordon is not None else len(pool.unclaimed(for_helper=True))


@final
class Preemption:
    """Preempts and restores the preemptible workloads of one host.

    Args:
        pool: The GPUs.
        workloads: The registry.
        commands: Suspends, stops and restores workloads.
        ask: Asks a workload with a stream, by its id, to release its GPUs within a time.
        withdraw: Withdraws that request.
    """

    def __init__(
        self,
        pool: GpuPool,
        workloads: Workloads,
        commands: Commands,
        ask: Callable[[str, float], None],
        withdraw: Callable[[Workload], None],
    ) -> None:
        self._pool = pool
        self._workloads = workloads
        self._commands = commands
        self._ask = ask
        self._withdraw = withdraw
        self._yielding: set[str] = set()
        self._waking: set[str] = set()
        self._stubborn: dict[str, int] = {}
        """Generations of workloads that could not be preempted; they are asked again in the next one."""

    async def run(self) -> None:
        """Preempts and restores until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._make_room(nursery)
                self._wake_some(nursery)
                await self._pool.slots.wait_changed()

    def _helpers(self) -> list[Workload]:
        return [workload for workload in self._workloads.all() if workload.spec.HasField("helper")]

    def _leases(self, *, without: str = "") -> list[HelperLease]:
        """The leases of preemptible workloads; the one of ``without`` never counts as asked."""
        return [
            HelperLease(
                helper.lease,
                asked=helper.workload_id in self._yielding and helper.workload_id != without,
                stubborn=self._stubborn.get(helper.workload_id) == helper.generation,
            )
            for helper in self._helpers()
            if helper.lease is not None
        ]

    def _make_room(self, nursery: trio.Nursery) -> None:
        if not self._pool.pending_claimers:
            return
        holding = {helper.lease.lease_id: helper for helper in self._helpers() if helper.lease is not None}
        for lease in helpers_to_ask(self._pool, self._leases()):
            helper = holding[lease.lease_id]
            self._yielding.add(helper.workload_id)
            nursery.start_soon(self._take_back, helper)

    async def _take_back(self, helper: Workload) -> None:
        """Asks a workload for its GPUs, and preempts it after its grace if they are still needed then."""
        try:
            grace_s = _grace_s(helper)
            logger.info("workload %s is asked to give up its GPUs within %g s", helper.name, grace_s)
            self._tell(helper)
            with trio.move_on_after(grace_s):
                await self._wait_given_back(helper)
            if self._is_needed(helper):
                await self._take(helper)
        except Exception:
            logger.exception("workload %s can't be asked for its GPUs because of a defect", helper.name)
            self._stubborn[helper.workload_id] = helper.generation
            await trio.sleep(AGAIN_S)
        finally:
            self._yielding.discard(helper.workload_id)
            self._withdraw(helper)

    def _tell(self, helper: Workload) -> None:
        self._ask(helper.workload_id, _grace_s(helper))
        if helper.spec.helper.HasField("signal_number"):
            try:
                send_signal(helper.root, helper.spec.helper.signal_number)
            except (OperationError, OSError) as error:
                logger.warning("workload %s can't be signalled: %s", helper.name, error)

    async def _wait_given_back(self, helper: Workload) -> None:
        while helper.lease is not None and self._pool.pending_claimers:
            await self._pool.slots.wait_changed()

    def _is_needed(self, helper: Workload) -> bool:
        """Whether a claim still waits for the GPUs of the workload: the original claim may be gone."""
        wanted = helpers_to_ask(self._pool, self._leases(without=helper.workload_id))
        return helper.lease in wanted

    async def _take(self, helper: Workload) -> None:
        if helper.spec.helper.process_strategy == eviction_pb2.PROCESS_STRATEGY_STOP:
            operation = Operation(stop=operation_pb2.StopOperation())
        else:
            suspend = operation_pb2.SuspendOperation(
                gives_way=True, policy=helper_policy(helper.spec.eviction)
            )
            operation = Operation(suspend=suspend)
        outcome = await self._commands.carry_out(helper.workload_id, operation)
        if outcome.state != SUCCEEDED:
            logger.warning("workload %s keeps its GPUs for now: %s", helper.name, outcome.error.message)
            self._stubborn[helper.workload_id] = helper.generation
            self._pool.slots.note_change()
            await trio.sleep(AGAIN_S)
            self._pool.slots.note_change()

    def _wake_some(self, nursery: trio.Nursery) -> None:
        """Restores as many preempted workloads as GPUs are free for, the longest suspended first."""
        spare = spare_gpus(self._pool)
        parked = [
            (helper.parked.since, len(helper.parked.gpu_uuids), helper)
            for helper in self._helpers()
            if helper.yielded and helper.state in PARKED and helper.parked is not None
        ]
        for _, needed, helper in sorted(parked, key=lambda entry: entry[0]):
            if needed <= spare and helper.workload_id not in self._waking:
                spare -= needed
                self._waking.add(helper.workload_id)
                nursery.start_soon(self._wake, helper)

    async def _wake(self, helper: Workload) -> None:
        try:
            operation = Operation(restore=operation_pb2.RestoreOperation())
            outcome = await self._commands.carry_out(helper.workload_id, operation)
            if outcome.state == SUCCEEDED:
                logger.info("restoring the preempted workload %s", helper.name)
                return
            logger.warning("workload %s can't be restored now: %s", helper.name, outcome.error.message)
            self._pool.slots.note_change()  # its turn is over, and the next may get the GPUs meanwhile
            await trio.sleep(AGAIN_S)
        except Exception:
            logger.exception("workload %s can't be restored because of a defect", helper.name)
            await trio.sleep(AGAIN_S)
        finally:
            self._waking.discard(helper.workload_id)
        if helper.state != RUNNING:
            self._pool.slots.note_change()


def _grace_s(helper: Workload) -> float:
    """The grace of a workload, from the request on."""
    terms = helper.spec.helper
    if not terms.HasField("grace"):
        return DEFAULT_GRACE_S
    return min(max(0.0, seconds(terms.grace)), GRACE_LIMIT_S)
