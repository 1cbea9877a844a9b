"""Targets of cordons: GPUs and whole workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leasehold_client.arguments.gpu_names import gpu_place, resolve_gpu
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.worker_pb2 import FleetGpu, Worker


@dataclass(frozen=True, slots=True)
class CordonTarget:
    """The target of one command.

    Attributes:
        worker_id: The worker.
        gpu_uuids: GPUs of the worker. Empty: the whole worker.
        label: Name for people.
    """

    worker_id: str
    gpu_uuids: tuple[str, ...]
    label: str


def find_targets(
    names: Sequence[str], workers: Sequence[Worker], gpus: Sequence[FleetGpu]
) -> list[CordonTarget]:
    """Resolves names to targets. The named GPUs of one worker are one target.

    Args:
        names: GPUs (a UUID, a unique prefix of a UUID, or worker/slot) and workers (a name or an id).
        workers: The workers of the fleet. Empty: names are GPUs only.
        gpus: The GPUs of the fleet.

    Raises:
        UsageError: A name matches nothing or several things, or two names match the same.
    """
    whole: dict[str, CordonTarget] = {}
    found: list[FleetGpu] = []
    for name in names:
        worker = _find_worker(name, workers, gpus)
        if worker is None:
            found.append(_find_gpu(name, gpus, or_worker=bool(workers)))
        elif worker.worker_id in whole:
            raise UsageError(f"{name!r} names worker {worker.name} a second time: name each worker once")
        else:
            whole[worker.worker_id] = CordonTarget(worker.worker_id, (), worker.name)
    return [*group_gpus(found), *whole.values()]


def group_gpus(gpus: Sequence[FleetGpu]) -> list[CordonTarget]:
    """Groups GPUs by worker, in order.

    Raises:
        UsageError: A GPU occurs twice.
    """
    by_worker: dict[str, list[FleetGpu]] = {}
    for gpu in gpus:
        others = by_worker.setdefault(gpu.worker_id, [])
        if any(other.gpu.uuid == gpu.gpu.uuid for other in others):
            raise UsageError(f"{gpu_place(gpu)} is named twice: name each GPU once")
        others.append(gpu)
    return [
        CordonTarget(worker_id, tuple(gpu.gpu.uuid for gpu in named), ", ".join(map(gpu_place, named)))
        for worker_id, named in by_worker.items()
    ]


def _find_worker(name: str, workers: Sequence[Worker], gpus: Sequence[FleetGpu]) -> Worker | None:
    """The worker with this id or name. None: the name can only be a GPU's."""
    found = [worker for worker in workers if worker.worker_id == name] or [
        worker for worker in workers if worker.name == name
    ]
    if len(found) > 1:
        raise UsageError(f"several workers are named {name!r}: write the id of a worker")
    if found and found[0].worker_id != name and _is_gpu(name, gpus):
        raise UsageError(
            f"{name!r} is both the name of a worker and a prefix of a GPU's UUID: write the worker's id "
            "or the GPU's whole UUID"
        )
    return found[0] if found else None


def _is_gpu(name: str, gpus: Sequence[FleetGpu]) -> bool:
    try:
        resolve_gpu(name, gpus)
    except UsageError:
        return False
    return True


def _find_gpu(name: str, gpus: Sequence[FleetGpu], *, or_worker: bool) -> FleetGpu:
    try:
        uuid = resolve_gpu(name, gpus)
    except UsageError as error:
        if or_worker and "/" not in name:
            raise UsageError(f"no worker is named {name!r}, and {error.message}") from error
        raise
    return next(gpu for gpu in gpus if gpu.gpu.uuid == uuid)
