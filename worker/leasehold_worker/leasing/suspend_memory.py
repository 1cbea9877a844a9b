"""Host memory that suspends take: what is left for one, and what others were promised.

A suspend moves device memory into the target's own host memory. Until it has, MemAvailable does not show
it, so what was promised is charged here, and two suspends at once can't both have the same memory. Afterwards
the kernel's figures show it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.errors import OperationError
from leasehold_worker.host.cgroups import MemoryLimit, memory_groups, memory_limits
from leasehold_worker.host.processes import memory_bytes

DEFAULT_RESERVE_BYTES: Final = 2**30
"""Host memory that no suspend may take: a gibibyte."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What parking some processes takes, and what there is.

    Attributes:
        bytes_by_pid: Device memory that each process has.
        bytes_by_group: The same by control group, of all in which the memory of a process counts.
        available_bytes: What the host has left, without the reserve and what was promised. None: unknown.
        cgroup: The control group that has the least to spare, with what it has left. None: none is limited.
    """

    bytes_by_pid: Mapping[int, int]
    bytes_by_group: Mapping[Path, int]
    available_bytes: int | None
    cgroup: MemoryLimit | None = None

    @property
    def needed_bytes(self) -> int:
        """What all of them need."""
        return sum(self.bytes_by_pid.values())

    @property
    def cgroup_needed_bytes(self) -> int:
        """What is needed in the control group that has the least to spare."""
        return 0 if self.cgroup is None else self.bytes_by_group[self.cgroup.path]

    def check(self) -> None:
        """Refuses what the host can't hold: its kernel would kill the process, or somebody else's.

        Raises:
            OperationError: INSUFFICIENT_HOST_MEMORY.
        """
        if self.available_bytes is not None and self.needed_bytes > self.available_bytes:
            raise _insufficient(
                f"{size_text(self.needed_bytes)} of device memory exceed the "
                f"{size_text(self.available_bytes)} of available host memory: free host "
                "memory, or have the program free device memory first"
            )
        if self.cgroup is not None and self.cgroup_needed_bytes > self.cgroup.available_bytes:
            raise _insufficient(
                f"{size_text(self.cgroup_needed_bytes)} of device memory exceed the "
                f"{size_text(self.cgroup.available_bytes)} available in control group "
                f"{self.cgroup.path}: raise its memory limit"
            )


@dataclass(frozen=True, eq=False, slots=True)
class _Charge:
    needed_bytes: int
    parks: bool
    bytes_by_group: Mapping[Path, int]


@final
class SuspendMemory:
    """The ledger of host memory that operations under way were promised.

    Args:
        reserve_bytes: Host memory that no suspend may take.
        makes_room: Whether the limit of a control group is raised for what is parked in it.
        limit_bytes: What parked workloads may take together. 0: as much as there is.
        parked_bytes: What they take.
    """

    def __init__(
        self,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        makes_room: Callable[[Path], bool] = lambda _: False,
        limit_bytes: int = 0,
        parked_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._reserve_bytes = reserve_bytes
        self._makes_room = makes_room
        self._limit_bytes = limit_bytes
        self._parked_bytes = parked_bytes
        self._charges: list[_Charge] = []

    @property
    def promised_bytes(self) -> int:
        """What all of them were promised."""
        return sum(charge.needed_bytes for charge in self._charges)

    def need(self, bytes_by_pid: Mapping[int, int], *, parks: bool = True) -> MemoryNeed:
        """What parking these processes takes, beside what there is now.

        Args:
            bytes_by_pid: What each takes.
            parks: It counts as parked. Else it is only on its way to the GPUs.
        """
        available = memory_bytes("MemAvailable")
        left = None if available is None else max(0, available - self._reserve_bytes - self.promised_bytes)
        if self._limit_bytes and parks:
            promised = sum(charge.needed_bytes for charge in self._charges if charge.parks)
            of_limit = max(0, self._limit_bytes - self._parked_bytes() - promised)
            left = of_limit if left is None else min(left, of_limit)
        needed = _bytes_by_group(bytes_by_pid)
        tightest: MemoryLimit | None = None
        for limit in memory_limits(group for group in needed if not self._makes_room(group)):
            promised = sum(charge.bytes_by_group.get(limit.path, 0) for charge in self._charges)
            spare = MemoryLimit(limit.path, max(0, limit.available_bytes - promised))
            if tightest is None or _slack(spare, needed) < _slack(tightest, needed):
                tightest = spare
        return MemoryNeed(bytes_by_pid, needed, left, tightest)

    @contextmanager
    def charged(self, bytes_by_pid: Mapping[int, int], *, parks: bool = True) -> Iterator[None]:
        """Promises host memory to an operation while it lasts; the check and the charge are one step.

        Args:
            bytes_by_pid: What each process takes.
            parks: As of :meth:`need`.

        Raises:
            OperationError: INSUFFICIENT_HOST_MEMORY.
        """
        need = self.need(bytes_by_pid, parks=parks)
        need.check()
        charge = _Charge(need.needed_bytes, parks, need.bytes_by_group)
        self._charges.append(charge)
        try:
            yield
        finally:
            self._charges.remove(charge)


def _bytes_by_group(bytes_by_pid: Mapping[int, int]) -> dict[Path, int]:
    needed: Counter[Path] = Counter()
    for pid, size in bytes_by_pid.items():
        needed.update(dict.fromkeys(memory_groups(pid), size))
    return needed


def _slack(limit: MemoryLimit, needed: Mapping[Path, int]) -> int:
    return limit.available_bytes - needed[limit.path]


def _insufficient(message: str) -> OperationError:
    return OperationError(errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY, message)
