"""Allocation of GPUs, CPU time, memory and disk for a workload, all or nothing.

GPUs are allocated first, since they are scarcest, then CPU time and memory, then disk. The release runs in
reverse. The pool leases GPUs and orders the claims. The host ledger reserves the rest in one step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, final, overload

from leasehold.v1 import errors_pb2, worker_pb2, workload_pb2

from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.leasing.host_reservations import NOTHING, HostRequest, HostReservation, HostReservations
from leasehold_worker.leasing.leases import FREE, Lease
from leasehold_worker.leasing.pool import GpuPool

logger = logging.getLogger(__name__)

_NO_GPU: Final = GpuRequest(0)
_ANY_GPU: Final = GpuRequest(1)


@dataclass(frozen=True, slots=True)
class AllocRequest:
    """The resources that a workload requests.

    Attributes:
        gpus: The GPUs. A count of 0 without further fields requests none.
        host: CPU time, memory and disk.
        hold_id: A hold, whose GPUs go before free ones. Its taker gets host resources even if claims wait for
            them. Empty: none.
    """

    gpus: GpuRequest = _NO_GPU
    host: HostRequest = NOTHING
    hold_id: str = ""

    @classmethod
    def of(
        cls, resources: workload_pb2.Resources, preferred: Sequence[str] = (), hold_id: str = ""
    ) -> "AllocRequest":
        """The request of a spec, unchecked; :meth:`validate` checks it.

        Args:
            resources: Resources of the spec.
            preferred: GPUs that a workload of the same name had last.
            hold_id: The hold.
        """
        return cls(
            GpuRequest(
                count=resources.gpu_count,
                memory_bytes=resources.gpu_memory_bytes,
                name=resources.gpu_name,
                gpu_uuids=tuple(resources.gpu_uuids),
                units=resources.gpu_units,
                acceptable_units=frozenset(resources.acceptable_gpu_units),
                preference=resources.gpu_preference,
                preferred=tuple(preferred),
                allow_foreign=resources.allow_foreign,
            ),
            HostRequest(resources.cpu_millicores, resources.memory_bytes, resources.disk_bytes),
            hold_id,
        )

    def validate(self) -> None:
        """Refuses a request that makes no sense on any host.

        Raises:
            OperationError: INVALID_ARGUMENT; metadata "field" names the field.
        """
        gpus = self.gpus
        for name, number in (
            ("gpu_count", gpus.count),
            ("gpu_memory_bytes", gpus.memory_bytes),
            ("gpu_units", gpus.units),
        ):
            if number < 0:
                raise invalid(name, f"{name} {number} is negative: give 0 or more")
        wished = gpus.memory_bytes or gpus.units or gpus.name or gpus.gpu_uuids or gpus.acceptable_units
        if gpus.count == 0 and wished:
            raise invalid(
                "gpu_count", "the request describes GPUs, but needs none: request 1 or more (--gpus)"
            )
        if any(units < 1 for units in gpus.acceptable_units):
            raise invalid("acceptable_gpu_units", "every GPU has 1 unit or more: leave smaller numbers out")
        if gpus.acceptable_units and gpus.units > gpus.count * max(gpus.acceptable_units):
            raise invalid(
                "gpu_units",
                f"the request needs {gpus.units} units of {gpus.count} GPUs, which have "
                f"{max(gpus.acceptable_units)} each at most: ask for more GPUs, or accept "
                "larger ones",
            )
        if gpus.gpu_uuids and len(set(gpus.gpu_uuids)) < gpus.count:
            raise invalid(
                "gpu_uuids",
                f"the request needs {gpus.count} GPUs and names {len(set(gpus.gpu_uuids))}: name more",
            )


@dataclass(frozen=True, slots=True)
class Preview:
    """The resources that an allocation would get now. Nothing is reserved, so they may soon be gone.

    Attributes:
        gpu_uuids: The GPUs, in the order in which the workload would see them.
        host: CPU time, memory and disk.
    """

    gpu_uuids: tuple[str, ...]
    host: HostRequest


@final
class Allocation:
    """The resources of a workload, until released. Only :class:`Resources` makes them.

    Attributes:
        workload_id: The holder.
        host: CPU time, memory and disk.
    """

    def __init__(
        self,
        workload_id: str,
        lease: Lease | None,
        host: HostReservation,
        pool: GpuPool,
        ledger: HostReservations,
    ) -> None:
        self.workload_id = workload_id
        self.host = host
        self._lease = lease
        self._pool = pool
        self._ledger = ledger
        self._released = False

    @property
    def lease(self) -> Lease | None:
        """The GPUs that :meth:`release` releases. None: there are none, or the caller took them over."""
        return self._lease

    def hand_over_lease(self) -> Lease | None:
        """Passes the GPUs to the caller: a remap exchanges a workload's lease, and a suspend releases it."""
        lease, self._lease = self._lease, None
        return lease

    def release(self) -> None:
        """Releases everything in reverse order, even if a part fails.

        Raises:
            OperationError: ALREADY_RELEASED: it was released before, and is unchanged.
            ExceptionGroup: The failures. The rest was released, and no retry is needed.
        """
        if self._released:
            raise OperationError(
                errors_pb2.ERROR_REASON_ALREADY_RELEASED,
                f"the shares of workload {self.workload_id} were already released: release them once",
            )
        self._released = True
        errors: list[Exception] = []
        in_reverse: list[Callable[[], None]] = [lambda: self._ledger.release(self.host), self._release_lease]
        for give_back in in_reverse:
            try:
                give_back()
            except Exception as error:  # noqa: BLE001 - the rest is given back all the same
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"some shares of workload {self.workload_id} could not be released", errors)

    def _release_lease(self) -> None:
        lease = self.hand_over_lease()
        if lease is not None and not self._pool.release(lease):
            raise OperationError(
                errors_pb2.ERROR_REASON_ALREADY_RELEASED,
                f"lease {lease.lease_id} of workload {lease.workload_id} was already "
                "released: release it once",
            )


@final
class Resources:
    """Allocates the resources of one host.

    Args:
        pool: The GPUs.
        ledger: CPU time, memory and disk. Its changes let the pool grant claims.
    """

    def __init__(self, pool: GpuPool, ledger: HostReservations) -> None:
        self._pool = pool
        self._ledger = ledger
        self._claims: dict[str, AllocRequest] = {}
        """Waiting requests by workload."""

    def why_not(self, request: AllocRequest) -> OperationError:
        """Why a request can't be granted now, with a remedy: first its GPUs, then the rest."""
        short = self._host_shortage(request)
        return short if short is not None else self._pool.why_not(request.gpus)

    def what_lacks(self, request: AllocRequest) -> str:
        """The missing resources of a request, as text."""
        short = self._host_shortage(request)
        return short.message if short is not None else self._pool.slots.what_lacks(request.gpus)

    def waits_for(self, workload_id: str) -> AllocRequest | None:
        """The request of a waiting workload. None: it does not wait."""
        return self._claims.get(workload_id)

    def _host_shortage(self, request: AllocRequest) -> OperationError | None:
        """The host resources that a request with enough GPUs lacks. None: GPUs are missing, or nothing is."""
        pool = self._pool
        if pool.slots.worker_cordon is not None:
            return None
        if request.gpus.count and pool.slots.choose(request.gpus, (), ()) is None:
            return None
        try:
            self._ledger.check(request.host)
        except OperationError as short:
            return short
        return None

    @overload
    def alloc(
        self, workload_id: str, request: AllocRequest, *, live: Literal[True], priority: int = 0
    ) -> Allocation: ...

    @overload
    def alloc(
        self, workload_id: str, request: AllocRequest, *, live: Literal[False], priority: int = 0
    ) -> Preview: ...

    def alloc(
        self, workload_id: str, request: AllocRequest, *, live: bool, priority: int = 0
    ) -> Allocation | Preview:
        """Allocates all requested resources without waiting, or only previews that.

        Args:
            workload_id: The holder.
            request: The resources.
            live: False changes nothing, and refuses what a live call would refuse.
            priority: Priority: resources reserved for waiting claims of this or higher priority are not
                available.

        Raises:
            OperationError: INVALID_ARGUMENT, INSUFFICIENT_RESOURCES, CORDONED, or another refusal of the
                pool. Nothing is held; failures of the rollback are in the error's notes.
        """
        request.validate()
        if self._pool.slots.worker_cordon is not None:
            raise self._pool.why_not(request.gpus)
        if not live:
            return self._preview(request, priority)
        lease: Lease | None = None
        if request.gpus.count:
            lease = self._pool.try_claim(
                workload_id, request.gpus, priority=priority, hold_id=request.hold_id
            )
            if lease is None:
                raise self._pool.why_not(request.gpus)
        try:
            host = self._ledger.reserve(workload_id, request.host, self._kept_host(request, priority))
        except Exception as error:
            if lease is not None:
                self._roll_back(lease, error)
            raise
        if self._claims:  # the resource that claims wait for may have changed
            self._pool.slots.note_change()
        return self._allocation(workload_id, lease, host)

    def alloc_named(self, workload_id: str, gpu_uuids: Sequence[str], request: AllocRequest) -> Allocation:
        """Allocates named GPUs, even if claims wait for them, and the rest; all or nothing.

        Raises:
            OperationError: As of :meth:`alloc`; nothing is held.
        """
        allow_foreign, hold_id = request.gpus.allow_foreign, request.hold_id
        lease = self._pool.claim_gpus(workload_id, gpu_uuids, allow_foreign=allow_foreign, hold_id=hold_id)
        try:
            reservation = self._ledger.reserve(workload_id, request.host)
        except Exception as error:
            self._roll_back(lease, error)
            raise
        return self._allocation(workload_id, lease, reservation)

    def check_named(self, gpu_uuids: Sequence[str], request: AllocRequest) -> None:
        """Refuses named GPUs that do not match a request, or that :meth:`alloc_named` would refuse now.

        Raises:
            OperationError: INVALID_ARGUMENT: their number differs; INCOMPATIBLE_GPU, or a
                refusal of the pool.
        """
        self._pool.slots.check_named(gpu_uuids, request.gpus)
        held = self._pool.holds.gpus_of(request.hold_id)
        self._pool.slots.check_free(gpu_uuids, allow_foreign=request.gpus.allow_foreign, held=held)

    async def claim(
        self, workload_id: str, request: AllocRequest, *, priority: int = 0, helper: bool = False
    ) -> Allocation:
        """Like a live :meth:`alloc`, but waits for its place in the queue, and for the other resources.

        A request for no GPU does not wait. A cancellation leaves no trace.

        Raises:
            OperationError: As of :meth:`alloc`, for a request that can never be granted.
        """
        request.validate()
        self._ledger.check_possible(request.host)
        if not request.gpus.count or not self._pool.slots.gpus:
            return self.alloc(workload_id, request, live=True, priority=priority)
        taken: list[HostReservation] = []

        def has_host(kept: HostRequest) -> bool:
            try:
                self._ledger.check(request.host, kept)
            except OperationError:
                return False
            return True

        def take_host(kept: HostRequest) -> bool:
            try:
                taken.append(self._ledger.reserve(workload_id, request.host, kept))
            except OperationError:
                return False
            return True

        self._claims[workload_id] = request
        try:
            lease = await self._pool.claim(
                workload_id,
                request.gpus,
                priority=priority,
                helper=helper,
                host=request.host,
                has_host=has_host,
                take_host=take_host,
            )
        except BaseException:
            for host in taken:
                self._ledger.release(host)
            raise
        finally:
            self._claims.pop(workload_id, None)
        return self._allocation(workload_id, lease, taken[0])

    def fetch_machine_resources(self) -> worker_pb2.MachineResources:
        """The host's resources for workloads, in total and free."""
        resources = self._ledger.figures()
        gpus = {gpu.uuid: gpu for gpu in self._pool.slots.gpus}
        leasable = [
            slot
            for slot in self._pool.slots.snapshot().slots
            if self._pool.slots.worker_cordon is None and slot.may_serve(_ANY_GPU)
        ]
        free = [gpus[slot.gpu_uuid] for slot in leasable if slot.state == FREE]
        sizes = [gpu.memory_bytes for gpu in free if gpu.memory_bytes is not None]
        resources.gpu_count_total = len(leasable)
        resources.gpu_count_free = len(free)
        resources.gpu_units_total = sum(gpus[slot.gpu_uuid].units for slot in leasable)
        resources.gpu_units_free = sum(gpu.units for gpu in free)
        if sizes:
            resources.gpu_memory_largest_free_bytes = max(sizes)
        return resources

    def _preview(self, request: AllocRequest, priority: int) -> Preview:
        gpu_uuids: tuple[str, ...] | None = ()
        if request.gpus.count:
            gpu_uuids = self._pool.preview(request.gpus, priority=priority, hold_id=request.hold_id)
        if gpu_uuids is None:
            raise self._pool.why_not(request.gpus)
        self._ledger.check(request.host, self._kept_host(request, priority))
        return Preview(gpu_uuids, request.host)

    def _kept_host(self, request: AllocRequest, priority: int) -> HostRequest:
        return NOTHING if request.hold_id else self._pool.kept_host(priority)

    def _allocation(self, workload_id: str, lease: Lease | None, host: HostReservation) -> Allocation:
        return Allocation(workload_id, lease, host, self._pool, self._ledger)

    def _roll_back(self, lease: Lease, cause: Exception) -> None:
        """Releases GPUs after an error. A failure of the release is added to the error as a note."""
        try:
            self._pool.release(lease)
        except Exception as error:
            cause.add_note(f"and lease {lease.lease_id} was not released cleanly: {error}")
            logger.exception("the rollback of an allocation failed")
