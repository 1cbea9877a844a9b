"""Host memory for suspends: the available amount, and the charges of running operations.

A suspend moves device memory into the process's own host memory. MemAvailable shows that only afterwards. So
each running suspend is charged here, and two suspends at once can't use the same memory.
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
"""Host memory that suspends may not use: a gibibyte."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The host memory that a suspend needs, and the available amount.

    Attributes:
        bytes_by_pid: Device memory of each process.
        bytes_by_group: Sum of the processes in each control group that counts their memory.
        available_bytes: Available memory of the host, less the reserve and the charges. None: unknown.
        cgroup: The control group with the least room, and its available memory. None: none is limited.
    """

    bytes_by_pid: Mapping[int, int]
    bytes_by_group: Mapping[Path, int]
    available_bytes: int | None
    cgroup: MemoryLimit | None = None

    @property
    def needed_bytes(self) -> int:
        """Needed bytes of all processes."""
        return sum(self.bytes_by_pid.values())

    @property
    def cgroup_needed_bytes(self) -> int:
        """Needed bytes in the control group with the least room."""
        return 0 if self.cgroup is None else self.bytes_by_group[self.cgroup.path]

    def check(self) -> None:
        """Refuses more than the host can hold: the kernel would kill a process.

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
    """The ledger of host memory that running operations are charged.

    Args:
        reserve_bytes: Host memory that suspends may not use.
        makes_room: Whether the limit of a control group grows with its suspended memory.
        limit_bytes: Limit of all suspended workloads together. 0: none.
        parked_bytes: Memory that they use.
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
        """The sum of the charges."""
        return sum(charge.needed_bytes for charge in self._charges)

    def need(self, bytes_by_pid: Mapping[int, int], *, parks: bool = True) -> MemoryNeed:
        """The host memory that a suspend of processes needs, with the available amount.

        Args:
            bytes_by_pid: Bytes by process.
            parks: The memory stays on the host. Otherwise the memory only passes through to the GPUs.
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
        """Charges host memory to an operation while it lasts; check and charge are one step.

        Args:
            bytes_by_pid: Bytes by process.
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
