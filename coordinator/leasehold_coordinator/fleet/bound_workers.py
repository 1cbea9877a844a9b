"""The bounds of a hello: the worker id, the GPUs and the epoch that belong to the worker's identity."""

from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.access.worker_bindings import WorkerBinding, WorkerBindings
from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.errors import FleetError

BOUND_GPU_LIMIT: Final = 1_024
"""Most GPUs of one identity, with those that its worker no longer has. Its hello chooses their UUIDs."""


def find_binding(
    bindings: WorkerBindings, registry: Registry, hello: Hello, *, is_certified: bool, is_restored: bool
) -> WorkerBinding | None:
    """Checks a hello, and finds what it claims and nobody has.

    Args:
        bindings: The bindings.
        registry: The known workers.
        hello: The hello, whose name is that of the credential.
        is_certified: Whether the credential is a certificate. The token of workers proves no name.
        is_restored: Whether an admin says that the store is an older copy, which knows no later epochs.

    Returns:
        The new binding of the name. None: nothing changes.

    Raises:
        FleetError: IDENTITY_MISMATCH, DUPLICATE_WORKER_ID, DUPLICATE_WORKER_GPU or PROTOCOL_VIOLATION.
    """
    gpu_uuids = [gpu.uuid for gpu in hello.gpus]
    bindings.check(hello.name, hello.worker_id, gpu_uuids)
    own = bindings.get(hello.name)
    if own is not None and not is_restored:
        _check_epoch(registry, hello, own)
    if not is_certified:
        return None
    check_own_id(registry, hello.name, hello.worker_id)
    claimed = frozenset(gpu_uuids)
    if own is not None and claimed <= own.gpu_uuids:
        return None
    bound = claimed | (own.gpu_uuids if own is not None else frozenset())
    if len(bound) > BOUND_GPU_LIMIT:
        raise FleetError(
            errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
            f"worker/{hello.name} has had {len(bound)} GPUs, of at most {BOUND_GPU_LIMIT}: unbind those that "
            "have left its host with `leasehold gpu unbind`",
            worker=hello.worker_id,
        )
    return WorkerBinding(hello.name, hello.worker_id, bound, own.epoch if own is not None else 0)


def check_own_id(registry: Registry, name: str, worker_id: str) -> None:
    """Refuses the id of a worker with another name, which may have joined by the token of workers.

    Raises:
        FleetError: DUPLICATE_WORKER_ID.
    """
    known = registry.get(worker_id)
    if known is not None and known.hello.name != name:
        raise FleetError(
            errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID,
            f"the worker id {worker_id} belongs to the worker {known.hello.name}, and not to {name}: give "
            "each host a state directory of its own; if the worker was renamed, `leasehold rm worker "
            f"{worker_id}`",
            worker=worker_id,
        )


def _check_epoch(registry: Registry, hello: Hello, own: WorkerBinding) -> None:
    known = registry.get(hello.worker_id)
    highest = max(own.epoch, known.epoch if known is not None else 0)
    if hello.last_epoch > highest:
        raise FleetError(
            errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
            f"the coordinator never gave epoch {hello.last_epoch} to worker/{hello.name}, and the highest "
            f"was {highest}: if the coordinator's store is an older copy, start it once with "
            "--store-restored; else look for a copy of the worker's state directory",
            worker=hello.worker_id,
        )
