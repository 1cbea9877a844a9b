"""The worker id and the GPUs that belong to the identity of each enrolled worker. Pure."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError


@dataclass(frozen=True, slots=True)
class WorkerBinding:
    """What belongs to the identity ``worker/NAME``.

    Attributes:
        name: The name of the identity.
        worker_id: The id of its worker.
        gpu_uuids: The GPUs of its worker.
        epoch: The highest epoch that the worker had seen when it joined.
    """

    name: str
    worker_id: str
    gpu_uuids: frozenset[str]
    epoch: int = 0


@final
class WorkerBindings:
    """The bindings of all enrolled workers."""

    def __init__(self) -> None:
        self._by_name: dict[str, WorkerBinding] = {}
        self._by_worker_id: dict[str, WorkerBinding] = {}
        self._by_gpu: dict[str, WorkerBinding] = {}

    def __iter__(self) -> Iterator[WorkerBinding]:
        """Every binding."""
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def put(self, binding: WorkerBinding) -> None:
        """Adds or replaces the binding of a name."""
        self.remove(binding.name)
        self._by_name[binding.name] = binding
        self._by_worker_id[binding.worker_id] = binding
        self._by_gpu |= dict.fromkeys(binding.gpu_uuids, binding)

    def remove(self, name: str) -> WorkerBinding | None:
        """Removes the binding of a name. None: the name has none."""
        binding = self._by_name.pop(name, None)
        if binding is not None:
            del self._by_worker_id[binding.worker_id]
            for uuid in binding.gpu_uuids:
                del self._by_gpu[uuid]
        return binding

    def get(self, name: str) -> WorkerBinding | None:
        """The binding of a name."""
        return self._by_name.get(name)

    def of_worker(self, worker_id: str) -> WorkerBinding | None:
        """The binding that has a worker id."""
        return self._by_worker_id.get(worker_id)

    def of_gpu(self, gpu_uuid: str) -> WorkerBinding | None:
        """The binding that has a GPU."""
        return self._by_gpu.get(gpu_uuid)

    def foreign_gpus(self, name: str, gpu_uuids: Collection[str]) -> dict[str, WorkerBinding]:
        """Those of some GPUs that belong to another name, with their bindings."""
        found = {uuid: self._by_gpu[uuid] for uuid in gpu_uuids if uuid in self._by_gpu}
        return {uuid: binding for uuid, binding in found.items() if binding.name != name}


def gpu_refusal(gpu_uuid: str, binding: WorkerBinding) -> FleetError:
    """The refusal of a GPU that belongs to another name."""
    return FleetError(
        errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU,
        f"GPU {gpu_uuid} belongs to worker/{binding.name}: if the GPU has moved, `leasehold gpu unbind "
        f"{gpu_uuid}`",
        gpu_uuid=gpu_uuid,
        worker=binding.worker_id,
    )
