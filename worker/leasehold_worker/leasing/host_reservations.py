"""Reservations of the host's CPU time, memory and disk. Pure bookkeeping.

A reservation limits later reservations. :mod:`leasehold_worker.host.cgroup_limits` has the kernel enforce it
where possible. The free amount is never negative, even if more is reserved than the host has, for example
after a restart of the worker with lower limits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.v1.worker_pb2 import MachineResources

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.errors import OperationError
from leasehold_worker.files.volume import DiskSpace
from leasehold_worker.host.capacity import HostLimits

KEPT_FREE_PERCENT: Final = 10
"""Share of the volume that is never reserved, even with a smaller setting."""


@dataclass(frozen=True, slots=True)
class HostRequest:
    """Requested resources of the host. 0: nothing.

    Raises:
        OperationError: INVALID_ARGUMENT: a number is negative.
    """

    cpu_millicores: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("cpu_millicores", "memory_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise OperationError(
                    errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
                    f"{name} {getattr(self, name)} is negative: give 0 or more",
                    {"field": name},
                )

    def __add__(self, other: "HostRequest") -> "HostRequest":
        return HostRequest(
            self.cpu_millicores + other.cpu_millicores,
            self.memory_bytes + other.memory_bytes,
            self.disk_bytes + other.disk_bytes,
        )


NOTHING: Final = HostRequest()


@dataclass(frozen=True, eq=False, slots=True)
class HostReservation:
    """Reserved resources of the host, until released. Only the ledger makes them.

    Attributes:
        holder: The holder.
        request: The resources.
    """

    holder: str
    request: HostRequest


@dataclass(frozen=True, slots=True)
class _Want:
    """One resource of a request, with the amounts of the host.

    Attributes:
        field: Its name in requests.
        wanted: Requested amount.
        free: Free amount.
        kept: Part of it that is reserved for waiting claims.
        most: Total amount.
        text: Formats an amount.
        what: Its name in messages.
        why: Addition to the message of a shortage.
    """

    field: str
    wanted: int
    free: int
    kept: int
    most: int
    text: Callable[[int], str]
    what: str
    why: str = ""

    def check_possible(self) -> None:
        """Refuses more than the total."""
        if self.wanted > self.most:
            raise self._refusal(
                f"the request needs {self.text(self.wanted)} of {self.what}, and this host "
                f"has at most {self.text(self.most)} for workloads: ask for less, or choose "
                "another host"
            )

    def check(self) -> None:
        """Refuses more than the free amount."""
        if self.wanted and self.wanted > self.free - self.kept:
            kept = f", with {self.text(self.kept)} reserved for waiting claims" if self.kept else ""
            raise self._refusal(
                f"the request needs {self.text(self.wanted)} of {self.what}, and "
                f"{self.text(self.free)} of {self.text(self.most)} are free{kept}{self.why}: "
                "wait until a workload ends, or ask for less"
            )

    def _refusal(self, message: str) -> OperationError:
        facts = {"field": self.field, "wanted": self.wanted, "free": self.free, "most": self.most}
        return OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
            message,
            {name: str(fact) for name, fact in facts.items()},
        )


@final
class HostReservations:
    """The ledger. It belongs to one thread, and never waits.

    Args:
        limits: CPU time and memory of all workloads together.
        disk: Reads the volume that workloads write to. It may raise OSError, which makes disk unavailable.
        parked_bytes: Host memory of suspended workloads, beside their reservations.
        on_change: Called after a release, so that waiting claims can be granted.
        disk_reserve_bytes: Reserve of the volume, if it exceeds a tenth of it.
    """

    def __init__(
        self,
        limits: HostLimits,
        disk: Callable[[], DiskSpace],
        parked_bytes: Callable[[], int],
        on_change: Callable[[], None],
        disk_reserve_bytes: int = 0,
    ) -> None:
        self._limits = limits
        self._disk = disk
        self._disk_reserve_bytes = disk_reserve_bytes
        self._parked_bytes = parked_bytes
        self._written: dict[HostReservation, int] = {}
        self._on_change = on_change

    @property
    def reservations(self) -> tuple[HostReservation, ...]:
        """The reservations, oldest first."""
        return tuple(self._written)

    def figures(self) -> MachineResources:
        """The total and free amounts now, without GPUs. An unreadable volume counts as empty."""
        volume = self._volume()
        total = volume.total_bytes if isinstance(volume, DiskSpace) else 0
        free = self._disk_free(volume) if isinstance(volume, DiskSpace) else 0
        return MachineResources(
            cpu_millicores_total=self._limits.cpu_millicores,
            cpu_millicores_free=self._cpu_free(),
            memory_total_bytes=self._limits.memory_bytes,
            memory_free_bytes=self._memory_free(),
            disk_total_bytes=total,
            disk_free_bytes=free,
        )

    def check(self, request: HostRequest, kept: HostRequest = NOTHING) -> None:
        """Refuses a request that :meth:`reserve` would refuse.

        Args:
            request: The request.
            kept: Reservations of waiting claims.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES; metadata has "field", "wanted", "free" and "most".
        """
        wants = self._wants(request, kept)
        for want in wants:
            want.check_possible()
        for want in wants:
            want.check()

    def check_possible(self, request: HostRequest) -> None:
        """Refuses a request beyond the host's totals, so that no claim waits for it in vain.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES, as of :meth:`check`.
        """
        for want in self._wants(request, NOTHING):
            want.check_possible()

    def reserve(self, holder: str, request: HostRequest, kept: HostRequest = NOTHING) -> HostReservation:
        """Reserves all requested resources or none, beside those of waiting claims.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES, as of :meth:`check`.
        """
        self.check(request, kept)
        return self.take_back(holder, request)

    def take_back(self, holder: str, request: HostRequest) -> HostReservation:
        """Restores a reservation after a restart of the worker, even if it exceeds the limits now."""
        reservation = HostReservation(holder, request)
        self._written[reservation] = 0
        return reservation

    def release(self, reservation: HostReservation) -> None:
        """Releases a reservation.

        Raises:
            OperationError: ALREADY_RELEASED: it was released before, or is not in this ledger.
        """
        if self._written.pop(reservation, None) is None:
            raise OperationError(
                errors_pb2.ERROR_REASON_ALREADY_RELEASED,
                f"the shares of {reservation.holder} were already released: release them once",
            )
        self._on_change()

    def set_written(self, reservation: HostReservation, written_bytes: int) -> None:
        """Sets the disk usage of a holder. The volume's figures include it, so the ledger counts it once.

        Has no effect on a released reservation.
        """
        before = self._written.get(reservation)
        if before is not None and before != written_bytes:
            self._written[reservation] = max(0, written_bytes)
            if written_bytes > before:
                self._on_change()

    def _wants(self, request: HostRequest, kept: HostRequest) -> list[_Want]:
        """The requested kinds, in the order of their reservation."""
        wants = [
            _Want(
                "cpu_millicores",
                request.cpu_millicores,
                self._cpu_free(),
                kept.cpu_millicores,
                self._limits.cpu_millicores,
                _cores_text,
                "CPU time",
            ),
            _Want(
                "memory_bytes",
                request.memory_bytes,
                self._memory_free(),
                kept.memory_bytes,
                self._limits.memory_bytes,
                size_text,
                "host memory",
                f", with {size_text(self._parked_bytes())} taken by suspended workloads",
            ),
        ]
        if request.disk_bytes:
            volume = self._volume()
            if isinstance(volume, str):
                raise OperationError(
                    errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES, volume, {"field": "disk_bytes"}
                )
            kept_free = self._kept_free(volume)
            wants.append(
                _Want(
                    "disk_bytes",
                    request.disk_bytes,
                    self._disk_free(volume),
                    kept.disk_bytes,
                    max(0, volume.total_bytes - kept_free),
                    size_text,
                    "disk",
                    f", with {size_text(kept_free)} kept as the reserve",
                )
            )
        return wants

    def _cpu_free(self) -> int:
        held = sum(reservation.request.cpu_millicores for reservation in self._written)
        return max(0, self._limits.cpu_millicores - held)

    def _memory_free(self) -> int:
        held = sum(reservation.request.memory_bytes for reservation in self._written)
        return max(0, self._limits.memory_bytes - held - self._parked_bytes())

    def _volume(self) -> DiskSpace | str:
        """The volume, or the error of reading it."""
        try:
            return self._disk()
        except OSError as error:
            return (
                f"no disk is available, since the volume can't be read ({error.strerror or error}): check it"
            )

    def _kept_free(self, volume: DiskSpace) -> int:
        return max(volume.total_bytes * KEPT_FREE_PERCENT // 100, self._disk_reserve_bytes)

    def _disk_free(self, volume: DiskSpace) -> int:
        to_be_written = sum(
            max(0, reservation.request.disk_bytes - written) for reservation, written in self._written.items()
        )
        return max(0, volume.available_bytes - self._kept_free(volume) - to_be_written)


def _cores_text(millicores: int) -> str:
    return f"{millicores / 1000:g} {'core' if millicores == 1000 else 'cores'}"
