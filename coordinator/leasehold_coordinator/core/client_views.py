"""Workers, GPUs, workloads and commands as clients read them. Values of variables are hidden. Pure."""

from collections.abc import Iterator

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import lease_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Cordon, GpuLease
from leasehold.v1.worker_pb2 import FleetGpu, Worker, WorkerState
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec

from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.secret_variables import blank_secrets
from leasehold_coordinator.core.workload_metadata import etag_of
from leasehold_coordinator.core.workload_states import is_ended


def worker_view(known: KnownWorker, state: WorkerState.ValueType, refusal: str) -> Worker:
    """A worker as clients read it."""
    hello = known.hello
    return Worker(
        worker_id=hello.worker_id,
        name=hello.name,
        state=state,
        epoch=known.epoch,
        agent_version=hello.agent_version,
        driver_version=hello.driver_version if hello.HasField("driver_version") else None,
        cuda_version=hello.cuda_version if hello.HasField("cuda_version") else None,
        host=hello.host,
        labels=hello.labels,
        capabilities=hello.capabilities,
        gpu_count=len(known.leases) if known.reported else None,
        free_gpu_count=len(known.free_gpu_uuids) if known.reported else None,
        pending_claimers=known.pending_claimers,
        parked_workload_count=known.parked_workload_count,
        last_seen_time=known.last_seen_time,
        host_memory_available_bytes=(
            known.load.host_memory_available_bytes
            if known.load.HasField("host_memory_available_bytes")
            else None
        ),
        resources=known.resources,
        cordon=known.cordon,
        session_encrypted=known.is_encrypted if known.session_id is not None else None,
        refusal=refusal,
    )


def gpu_slots(known: KnownWorker) -> Iterator[tuple[Gpu, GpuLease]]:
    """The GPUs of a worker in slot order, each with its lease as clients see it.

    A worker that has not reported yields no GPU. A GPU without a reported lease has an empty lease.
    """
    if not known.reported:
        return
    leases = {lease.gpu_uuid: lease for lease in known.leases}
    for gpu in known.hello.gpus:
        lease = leases.get(gpu.uuid)
        yield gpu, GpuLease() if lease is None else _seen_lease(lease, known.cordon)


def gpu_views(known: KnownWorker) -> Iterator[FleetGpu]:
    """The GPUs of :func:`gpu_slots` as messages for clients."""
    worker_id, name, seen = known.hello.worker_id, known.hello.name, known.last_seen_time
    for gpu, lease in gpu_slots(known):
        yield FleetGpu(
            worker_id=worker_id,
            worker_name=name,
            gpu=gpu,
            lease=lease if lease.gpu_uuid else None,
            report_time=seen,
        )


def _seen_lease(lease: GpuLease, cordon: Cordon | None) -> GpuLease:
    """A lease as clients see it: a free GPU of a cordoned worker counts as cordoned."""
    if cordon is None or lease.state != lease_pb2.SLOT_STATE_FREE:
        return lease
    seen = GpuLease()
    seen.CopyFrom(lease)
    seen.state = lease_pb2.SLOT_STATE_CORDONED
    if not seen.HasField("cordon"):
        seen.cordon.CopyFrom(cordon)
    return seen


def workload_view(workload: Workload, *, in_contact: bool, seen: Timestamp | None) -> Workload:
    """A workload as clients read it.

    Args:
        workload: The workload.
        in_contact: The worker is in contact. Otherwise the view says how old the status is.
        seen: When the last frame of the worker came. None: none since the coordinator started.
    """
    view = Workload()
    view.CopyFrom(workload)
    _hide_values(view.spec)
    view.etag = etag_of(workload)
    if not in_contact and not is_ended(workload.status.state):
        view.out_of_contact = True
        if seen is not None:
            view.report_time.CopyFrom(seen)
    return view


def command_view(command: Command) -> Command:
    """A command as clients read it."""
    spec = command.operation.run.spec
    if not spec.environment and not spec.secret_environment:
        return command
    view = Command()
    view.CopyFrom(command)
    _hide_values(view.operation.run.spec)
    return view


def _hide_values(spec: WorkloadSpec) -> None:
    for name in list(spec.environment):  # a map must not change during its iteration
        spec.environment[name] = ""
    blank_secrets(spec)
