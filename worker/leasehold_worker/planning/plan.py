"""The plan of an operation: its effects, and all reasons that forbid it. Values only.

The operation itself begins with the same plan, so that it can't differ from a dry run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.plan_pb2 import Tier

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import CHECKPOINTED, Member, are_unlisted, needed_by_gpu
from leasehold_worker.driver.process import DEFAULT_LOCK_TIMEOUT_S
from leasehold_worker.driver.transfer_rates import Estimate
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_trees import ProcessTree
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.suspend_memory import MemoryNeed
from leasehold_worker.planning.findings import Findings
from leasehold_worker.workloads.eviction import CHECKPOINT, process_text
from leasehold_worker.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Destination:
    """A GPU of the plan, with its free memory and the memory that is needed. None: unknown to NVML."""

    gpu_uuid: str
    chip: str
    free_bytes: int | None
    needed_bytes: int | None


@dataclass(frozen=True, slots=True)
class TierNeed:
    """Bytes that a tier would receive, and its free space. None: unknown, or without a bound."""

    tier: Tier.ValueType
    needed_bytes: int | None
    available_bytes: int | None


@dataclass(frozen=True, slots=True)
class MoveDown:
    """A suspended workload that moves to a lower tier.

    Attributes:
        workload_id: Its id.
        name: Its name.
        policy: Policy of its suspend afterwards.
        freed_bytes: Bytes that the move frees in its tier.
        generation: Its generation when it was chosen: a workload that has changed since stays.
    """

    workload_id: str
    name: str
    policy: EvictionPolicy
    freed_bytes: int
    generation: int

    @property
    def text(self) -> str:
        """A sentence about the move."""
        strategy = process_text(self.policy.process_strategy)
        size = size_text(self.freed_bytes)
        return f"workload {self.name} is suspended by {strategy} first, which frees {size}"


@dataclass(slots=True)
class WorkloadPlan:
    """A workload of an operation.

    Attributes:
        workload: The workload.
        tree: The tree of its processes. None: not listed.
        processes: All its processes.
        members: The processes that use CUDA.
        home: GPUs that it holds, or held before its suspend.
        destination: Its GPUs afterwards, in the order of ``home``; none after a suspend.
        full_bytes: Device memory that it needs while it runs, by GPU.
        wakes: It runs afterwards, perhaps without a GPU.
    """

    workload: Workload
    tree: ProcessTree | None = None
    processes: Sequence[ProcessIdentity] = ()
    members: tuple[Member, ...] = ()
    home: tuple[str, ...] = ()
    destination: tuple[str, ...] = ()
    full_bytes: Mapping[str, int] = field(default_factory=dict)
    wakes: bool = False


@dataclass(slots=True)
class Plan:
    """The effects of an operation.

    Attributes:
        targets: The workloads of the operation.
        already_there: There is nothing to do.
        astray: Members are on wrong GPUs, which they must leave before a restore.
        pairs: Complete pairs for the driver; none if all stay.
        destinations: GPUs that the operation needs.
        host_memory: Host memory of a suspend. None: nothing is suspended.
        estimate: Estimated duration. None: unknown.
        findings: The checks and refusals.
        policy: Policy of the suspend that is done or undone. None: there is none.
        asked_policy: Policy that the request names for a suspend. None: the workload's own policy applies.
        steps: The steps of the operation, as text.
        tiers: Memory tiers that bytes would go to, or come from.
        checkpoint_id: Checkpoint of a restore. Empty: none.
        moves_down: Suspended workloads that move to a lower tier first.
        saves: The application saves itself, so nothing is lost.
        lock_timeout_s: Time for submitted work to finish.
        named_gpu_uuids: GPUs that the request names for a restore.
        named_checkpoint_id: The checkpoint that the request names for a restore. Empty: none.
        hold_id: The hold that the request names for a restore. Empty: none.
        move_warnings: Warnings that hold once the workloads are on their new GPUs.
    """

    targets: list[WorkloadPlan] = field(default_factory=list)
    already_there: bool = False
    astray: bool = False
    pairs: tuple[GpuPair, ...] = ()
    destinations: list[Destination] = field(default_factory=list)
    host_memory: MemoryNeed | None = None
    estimate: Estimate | None = None
    findings: Findings = field(default_factory=Findings)
    policy: EvictionPolicy | None = None
    asked_policy: EvictionPolicy | None = None
    steps: Sequence[str] = ()
    tiers: list[TierNeed] = field(default_factory=list)
    checkpoint_id: str = ""
    moves_down: list[MoveDown] = field(default_factory=list)
    saves: bool = False
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    named_gpu_uuids: Sequence[str] = ()
    named_checkpoint_id: str = ""
    hold_id: str = ""
    move_warnings: Sequence[str] = ()

    @property
    def members(self) -> list[Member]:
        """The CUDA processes of all workloads."""
        return [member for target in self.targets for member in target.members]

    @property
    def is_unsized(self) -> bool:
        """Whether the device memory of all members is unknown, such as of suspended ones without a record."""
        return are_unlisted(self.members) and not any(member.total_bytes for member in self.members)

    @property
    def bytes_by_pid(self) -> dict[int, int]:
        """Device memory by process. Checkpointed memory is in host memory already."""
        return {
            member.identity.pid: member.total_bytes for member in self.members if member.state != CHECKPOINTED
        }

    def unsized_gpus(self) -> Iterator[tuple[str, str]]:
        """Names of workloads and UUIDs of their GPUs on which their device memory is unknown."""
        for target in self.targets:
            resident = [member for member in target.members if member.state != CHECKPOINTED]
            known = needed_by_gpu(resident, target.home)
            yield from ((target.workload.name, uuid) for uuid in target.home if uuid not in known)

    def require_sizes(self) -> None:
        """Refuses to suspend members of unknown size: the host memory that they need is unknown, too.

        Raises:
            OperationError: INSUFFICIENT_HOST_MEMORY.
        """
        for name, gpu_uuid in self.unsized_gpus():
            raise OperationError(
                errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
                f"NVML reports neither the memory of workload {name} on "
                f"{gpu_uuid} nor the memory in use there, so it is unknown whether host "
                "memory can hold it: see `nvidia-smi -q -d MEMORY`, or stop the workload",
                {"gpu_uuid": gpu_uuid},
            )

    @property
    def stays_in_memory(self) -> bool:
        """Whether device memory stays in host memory, and does not move on to disk."""
        return self.policy is None or self.policy.process_strategy != CHECKPOINT

    @property
    def target(self) -> WorkloadPlan:
        """The only workload of a suspend or a restore."""
        (target,) = self.targets
        return target

    def to_reserve(self, target: WorkloadPlan) -> list[str]:
        """GPUs that a workload gets and that no workload of the plan holds."""
        leases = [other.workload.lease for other in self.targets if other.workload.lease is not None]
        held = {gpu_uuid for lease in leases for gpu_uuid in lease.gpu_uuids}
        return [gpu_uuid for gpu_uuid in target.destination if gpu_uuid not in held]

    def swapped(self, target: WorkloadPlan) -> list[str]:
        """GPUs that a workload gets from other workloads of the plan."""
        kept = {*target.workload.gpu_uuids, *self.to_reserve(target)}
        return [gpu_uuid for gpu_uuid in target.destination if gpu_uuid not in kept]

    @property
    def is_parked(self) -> bool:
        """Whether its workloads are suspended already, so that their hooks have been called."""
        return all(target.workload.parked is not None for target in self.targets)

    def require_room(self) -> None:
        """Refuses a plan that still lacks memory or disk after other workloads have moved down.

        Raises:
            OperationError: INSUFFICIENT_HOST_MEMORY or INSUFFICIENT_DISK.
        """
        if self.findings.excused:
            raise self.findings.excused[0]

    @property
    def refused(self) -> bool:
        """Whether a check forbids the operation."""
        return bool(self.findings.refusals)

    def require(self) -> None:
        """Raises the first refusal."""
        if self.findings.refusals:
            raise self.findings.refusals[0]
