"""The worker's reports hello and worker_load, each from one consistent view."""

import logging
import os
import platform
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, final

from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.worker_pb2 import Capability, HostFacts
from leasehold.worker.v1.session_pb2 import Hello, ProtocolVersion, WorkerLoad

from leasehold_worker import __version__
from leasehold_worker.applications.registry import ApplicationRegistry
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import Journal
from leasehold_worker.criu.support import CriuSupport
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.gpus.inventory import GpuReading, Inventory
from leasehold_worker.host import processes
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.leasing.allocation import Resources
from leasehold_worker.leasing.messages import cordon_message, gpu_lease_messages, gpu_message
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.planning.driver_checks import REMAP_CUDA_VERSION, SUSPEND_CUDA_VERSION, why_unsupported
from leasehold_worker.threads import run_in_thread
from leasehold_worker.timestamps import timestamp
from leasehold_worker.workloads.messages import parked_workload_messages, workload_message
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED

logger = logging.getLogger(__name__)

PROTOCOL_VERSION: Final = ProtocolVersion(major=1, minor=9)
"""Version of the protocol. Peers need the same major version."""

HELLO_LIMIT_BYTES: Final = 131_072
"""Half a frame. The coordinator has the specs in its store; without them, 256 workloads fit."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The worker's identity.

    Attributes:
        worker_id: Kept across restarts.
        name: Its name.
        labels: From its configuration.
        instance_id: Random for each start.
    """

    worker_id: str
    name: str
    labels: Mapping[str, str]
    instance_id: str

    @classmethod
    def of_this_start(cls, worker_id: str, name: str, labels: Mapping[str, str]) -> "WorkerIdentity":
        """The identity with a new instance id."""
        return cls(worker_id, name, labels, uuid.uuid4().hex)


@final
class Reporter:
    """Builds hello and worker_load."""

    def __init__(
        self,
        identity: WorkerIdentity,
        commands: Commands,
        journal: Journal,
        *,
        inventory: Inventory,
        driver: Driver,
        pool: GpuPool,
        resources: Resources,
        workloads: Workloads,
        limits: ResourceLimits,
        criu: CriuSupport,
        applications: ApplicationRegistry,
    ) -> None:
        self._identity = identity
        self._inventory = inventory
        self._driver = driver
        self._pool = pool
        self._resources = resources
        self._workloads = workloads
        self._limits = limits
        self._criu = criu
        self._applications = applications
        self._commands = commands
        self._journal = journal
        self._load_sequence = 0

    async def read_gpus(self) -> dict[str, GpuReading]:
        """Measures every GPU, in a thread."""
        try:
            return await run_in_thread(self._inventory.read)
        except OSError as error:
            logger.warning("the GPUs can't be read for now: %s", error)
            return {gpu.uuid: GpuReading() for gpu in self._inventory.gpus}

    def hello(self, readings: Mapping[str, GpuReading], last_epoch: int) -> Hello:
        """The whole state of the worker. Specs are left out if the frame would be too large."""
        versions = self._inventory.versions
        hello = Hello(
            worker_id=self._identity.worker_id,
            name=self._identity.name,
            instance_id=self._identity.instance_id,
            boot_id=processes.boot_id(),
            last_epoch=last_epoch,
            protocol_version=PROTOCOL_VERSION,
            agent_version=__version__,
            driver_version=versions.driver_version,
            cuda_version=versions.cuda_version,
            nvml_version=versions.nvml_version,
            host=_host_facts(),
            labels=self._identity.labels,
            capabilities=self._capabilities(),
            gpus=self._gpus(),
            gpu_leases=gpu_lease_messages(self._pool.slots.snapshot().slots, readings),
            workloads=[
                workload_message(workload, self._identity.worker_id) for workload in self._workloads.all()
            ],
            commands_in_flight=self._commands.in_flight,
            commands_unacknowledged=[update.command_id for update in self._commands.unacknowledged],
            resources=self._resources.fetch_machine_resources(),
            cordon=cordon_message(self._pool.slots.worker_cordon),
        )
        if hello.ByteSize() > HELLO_LIMIT_BYTES:
            for workload in hello.workloads:
                workload.ClearField("spec")
        if hello.ByteSize() > HELLO_LIMIT_BYTES:
            for workload in hello.workloads:
                workload.status.ClearField("members")
        return hello

    def description(self) -> list[Gpu | Capability]:
        """The parts of hello that may change while the worker runs, and are then sent again."""
        return [*self._gpus(), *self._capabilities()]

    def _gpus(self) -> list[Gpu]:
        units = {gpu.uuid: gpu.units for gpu in self._pool.slots.gpus}
        return [
            gpu_message(facts, slot, units[facts.uuid]) for slot, facts in enumerate(self._inventory.gpus)
        ]

    def last_load(self) -> WorkerLoad:
        """The leases at the end of the worker, which reads no GPU any more."""
        return self.load({gpu.uuid: GpuReading() for gpu in self._inventory.gpus}, "")

    def load(self, readings: Mapping[str, GpuReading], session_id: str) -> WorkerLoad:
        """The current leases of all GPUs, with the next sequence number."""
        self._load_sequence += 1
        return WorkerLoad(
            session_id=session_id,
            sequence=self._load_sequence,
            gpu_leases=gpu_lease_messages(self._pool.slots.snapshot().slots, readings),
            pending_claimers=self._pool.pending_claimers,
            parked=parked_workload_messages(
                workload for workload in self._workloads.all() if workload.state not in ENDED
            ),
            host_memory_available_bytes=processes.memory_bytes("MemAvailable"),
            sample_time=timestamp(datetime.now(UTC)),
            resources=self._resources.fetch_machine_resources(),
            cordon=cordon_message(self._pool.slots.worker_cordon),
        )

    def _capabilities(self) -> list[Capability]:
        mig = [gpu.uuid for gpu in self._inventory.gpus if gpu.mig_enabled]
        return [
            self._driver_capability("cuda_suspend", SUSPEND_CUDA_VERSION, mig),
            self._driver_capability("gpu_remap", REMAP_CUDA_VERSION, mig),
            Capability(
                name="checkpoint_image",
                available=not self._criu.unavailable_reason,
                reason=self._criu.unavailable_reason,
            ),
            Capability(name="application_checkpoint", available=True),
            Capability(
                name="cpu_limit",
                available=not self._limits.cpu_refusal,
                reason=self._limits.cpu_refusal,
            ),
            Capability(
                name="memory_limit",
                available=not self._limits.memory_refusal,
                reason=self._limits.memory_refusal,
            ),
            Capability(
                name="health_events",
                available=not self._inventory.health_lacks,
                reason="; ".join(self._inventory.health_lacks),
            ),
            self._commands_capability(),
        ]

    def _commands_capability(self) -> Capability:
        refusal = self._journal.refusal
        if refusal is None:
            return Capability(name="commands", available=True)
        reason = f"{refusal.message}; until then, the states of workloads are older ones"
        return Capability(name="commands", reason=reason)

    def _driver_capability(self, name: str, cuda_version: int, mig: list[str]) -> Capability:
        reason = why_unsupported(self._driver, cuda_version) or ""
        if not reason and mig:
            reason = f"MIG is on for {', '.join(mig)}: turn it off with nvidia-smi -mig 0"
        return Capability(name=name, available=not reason, reason=reason)


def _host_facts() -> HostFacts:
    return HostFacts(
        hostname=socket.gethostname(),
        kernel_release=platform.release(),
        architecture=platform.machine(),
        cpu_count=os.cpu_count(),
        memory_total_bytes=processes.memory_bytes("MemTotal"),
    )
