"""The worker id and the GPUs that belong to the identity of each enrolled worker. Pure."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError


@dataclass(frozen=True, slots=True)
class WorkerBinding:
    """The worker id and the GPUs that belong to the identity ``worker/NAME``.

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
            self._by_worker_id.pop(binding.worker_id, None)
            for uuid in binding.gpu_uuids:
                self._by_gpu.pop(uuid, None)
        return binding

    @contextmanager
    def being_stored(self, binding: WorkerBinding | None) -> Iterator[None]:
        """The context of a write of a binding, which counts from the beginning, and not after a failure.

        Only one change of bindings may be made at a time.

        Args:
            binding: The new binding of its name. None: the write has none.
        """
        if binding is None:
            yield
            return
        before = self.get(binding.name)
        self.put(binding)
        try:
            yield
        except FleetError:
            self.remove(binding.name)
            if before is not None:
                self.put(before)
            raise

    def get(self, name: str) -> WorkerBinding | None:
        """The binding of a name."""
        return self._by_name.get(name)

    def of_worker(self, worker_id: str) -> WorkerBinding | None:
        """The binding that has a worker id."""
        return self._by_worker_id.get(worker_id)

    def of_gpu(self, gpu_uuid: str) -> WorkerBinding | None:
        """The binding that has a GPU."""
        return self._by_gpu.get(gpu_uuid)

    def check(self, name: str, worker_id: str, gpu_uuids: Collection[str]) -> None:
        """Refuses what belongs to another name.

        Raises:
            FleetError: IDENTITY_MISMATCH, DUPLICATE_WORKER_ID or DUPLICATE_WORKER_GPU.
        """
        own, other = self.get(name), self.of_worker(worker_id)
        if own is not None and own.worker_id != worker_id:
            raise FleetError(
                errors_pb2.ERROR_REASON_IDENTITY_MISMATCH,
                f"worker/{name} has the worker id {own.worker_id}, and not {worker_id}: use the state "
                f"directory with that id, or `leasehold rm worker {name}` and join again",
                worker=own.worker_id,
            )
        if other is not None and other.name != name:
            raise FleetError(
                errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID,
                f"the worker id {worker_id} belongs to worker/{other.name}: give each host a state directory "
                "of its own, not a copy",
                worker=worker_id,
            )
        for uuid in gpu_uuids:
            owner = self._by_gpu.get(uuid)
            if owner is not None and owner.name != name:
                raise FleetError(
                    errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU,
                    f"GPU {uuid} belongs to worker/{owner.name}: if the GPU has moved, unbind it with "
                    f"`leasehold gpu unbind {uuid}`",
                    gpu_uuid=uuid,
                    worker=owner.worker_id,
                )
