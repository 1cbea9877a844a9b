"""What an operation would do, and everything that stands in its way. Values only.

The operation itself begins with the same plan, so that a dry run and the real thing can't differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leasehold.v1 import errors_pb2
from leasehold.v1.plan_pb2 import Tier
from leasehold.v1.workload_pb2 import EvictionPolicy

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import CHECKPOINTED, Member, needed_by_gpu
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
    """A GPU that would be taken, with its free memory and what is needed there. None: NVML couldn't say."""

    gpu_uuid: str
    chip: str
    free_bytes: int | None
    needed_bytes: int | None


@dataclass(frozen=True, slots=True)
class TierNeed:
    """Where bytes would go. None: only the application knows; or nobody knows what is left, or no bound."""

    tier: Tier.ValueType
    needed_bytes: int | None
    available_bytes: int | None


@dataclass(frozen=True, slots=True)
class MoveDown:
    """A parked workload that makes room.

    Attributes:
        workload_id: Which.
        name: What people call it.
        policy: What it is parked by afterwards.
        freed_bytes: What is free in its tier then.
        generation: The workload as it was when it was chosen: one that has changed stays.
    """

    workload_id: str
    name: str
    policy: EvictionPolicy
    freed_bytes: int
    generation: int

    @property
    def text(self) -> str:
        """The same in words."""
        strategy = process_text(self.policy.process_strategy)
        size = size_text(self.freed_bytes)
        return f"workload {self.name} is suspended by {strategy} first, which frees {size}"


@dataclass(slots=True)
class WorkloadPlan:
    """A workload of an operation.

    Attributes:
        workload: The workload.
        tree: Its processes as they were listed. None: they were not.
        processes: The same, of which not all need use CUDA.
        members: Those that use CUDA.
        home: GPUs that it holds, or was parked from.
        destination: GPUs that it is to have afterwards, in the order of ``home``; none when it is parked.
        full_bytes: What it needs on its GPUs once it is awake, by GPU.
        wakes: It is to run afterwards, though it may hold no GPU.
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
    """What an operation would do.

    Attributes:
        targets: The workloads that it is about.
        already_there: There is nothing to do.
        astray: Members are on GPUs that they must leave before they can be woken.
        pairs: Complete pairs for the driver; none where all stay.
        destinations: GPUs that would be taken.
        host_memory: What parking takes. None: nothing is parked.
        estimate: How long it would take. None: that can't be said.
        findings: The checks, and why it would be refused.
        policy: How the workload is parked, or is to be. None: the operation parks and wakes nothing.
        steps: What is done, in order, in words.
        tiers: Where bytes would go, or come from.
        checkpoint_id: What on disk it is woken from. Empty: nothing.
        moves_down: Parked workloads that make room first.
        saves: Nothing is lost, because its application saves itself.
        lock_timeout_s: How long submitted work may take to drain.
        named_gpu_uuids: GPUs that the request names for a restore.
        named_checkpoint_id: The checkpoint that the request names for a restore. Empty: none.
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
    steps: Sequence[str] = ()
    tiers: list[TierNeed] = field(default_factory=list)
    checkpoint_id: str = ""
    moves_down: list[MoveDown] = field(default_factory=list)
    saves: bool = False
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    named_gpu_uuids: Sequence[str] = ()
    named_checkpoint_id: str = ""

    @property
    def members(self) -> list[Member]:
        """The CUDA processes of all parties."""
        return [member for target in self.targets for member in target.members]

    @property
    def bytes_by_pid(self) -> dict[int, int]:
        """Device memory by the process that has it. What is checkpointed is in the host's memory already."""
        return {
            member.identity.pid: member.total_bytes for member in self.members if member.state != CHECKPOINTED
        }

    def require_sizes(self) -> None:
        """Refuses to park members of unknown size: whether the host's memory can hold them is not known.

        Raises:
            OperationError: INSUFFICIENT_HOST_MEMORY.
        """
        for target in self.targets:
            resident = [member for member in target.members if member.state != CHECKPOINTED]
            known = needed_by_gpu(resident, target.home)
            if unknown := [gpu_uuid for gpu_uuid in target.home if gpu_uuid not in known]:
                raise OperationError(
                    errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
                    f"NVML reports neither the memory of workload {target.workload.name} on "
                    f"{unknown[0]} nor the memory in use there, so it is unknown whether host "
                    "memory can hold it: see `nvidia-smi -q -d MEMORY`, or stop the workload",
                    {"gpu_uuid": unknown[0]},
                )

    @property
    def stays_in_memory(self) -> bool:
        """Whether device memory is to stay in the host's, rather than to go on to disk."""
        return self.policy is None or self.policy.process_strategy != CHECKPOINT

    @property
    def target(self) -> WorkloadPlan:
        """The only party of a suspend or a restore."""
        (target,) = self.targets
        return target

    def to_reserve(self, target: WorkloadPlan) -> list[str]:
        """GPUs that a party gets and that no party of the plan holds."""
        leases = [other.workload.lease for other in self.targets if other.workload.lease is not None]
        held = {gpu_uuid for lease in leases for gpu_uuid in lease.gpu_uuids}
        return [gpu_uuid for gpu_uuid in target.destination if gpu_uuid not in held]

    @property
    def is_parked(self) -> bool:
        """Whether its workloads are parked already, so that their hooks have been called."""
        return all(target.workload.parked is not None for target in self.targets)

    def require_room(self) -> None:
        """Refuses a plan for which others would have to make room still, though they were asked.

        Raises:
            OperationError: INSUFFICIENT_HOST_MEMORY or INSUFFICIENT_DISK.
        """
        if self.findings.excused:
            raise self.findings.excused[0]

    @property
    def refused(self) -> bool:
        """Whether something stops it."""
        return bool(self.findings.refusals)

    def require(self) -> None:
        """Raises the first refusal."""
        if self.findings.refusals:
            raise self.findings.refusals[0]
