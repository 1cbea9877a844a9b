"""The unfinished workloads, by id, by worker and by name."""

from collections.abc import Iterator, MutableMapping, ValuesView
from typing import final

from leasehold.v1.workload_pb2 import Workload


@final
class LiveWorkloads(MutableMapping[str, Workload]):
    """Workloads by id. A workload is never changed in place, only replaced.

    The index by worker keeps lookups fast when thousands of workers reconnect.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Workload] = {}
        self._by_worker: dict[str, dict[str, None]] = {}
        self._by_name: dict[str, dict[str, None]] = {}

    def __getitem__(self, workload_id: str) -> Workload:
        return self._by_id[workload_id]

    def __setitem__(self, workload_id: str, workload: Workload) -> None:
        self.pop(workload_id, None)
        self._by_id[workload_id] = workload
        self._by_worker.setdefault(workload.worker_id, {})[workload_id] = None
        self._by_name.setdefault(workload.name, {})[workload_id] = None

    def __delitem__(self, workload_id: str) -> None:
        workload = self._by_id.pop(workload_id)
        for index, key in ((self._by_worker, workload.worker_id), (self._by_name, workload.name)):
            del index[key][workload_id]
            if not index[key]:
                del index[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def values(self) -> ValuesView[Workload]:
        """All workloads. Faster than the inherited method, which looks up each id."""
        return self._by_id.values()

    def of_worker(self, worker_id: str) -> list[Workload]:
        """The workloads of a worker."""
        return [self._by_id[workload_id] for workload_id in self._by_worker.get(worker_id, ())]

    def named(self, name: str) -> list[Workload]:
        """The workloads with this name. Different workers may register the same name."""
        return [self._by_id[workload_id] for workload_id in self._by_name.get(name, ())]
