"""The unfinished workloads, by id, by worker and by name."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, ValuesView
from contextlib import contextmanager
from typing import final

from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import FleetError


@final
class LiveWorkloads(MutableMapping[str, Workload]):
    """Workloads by id. A workload is never changed in place, only replaced.

    The index by worker keeps lookups fast when thousands of workers reconnect.

    Decisions count a workload as it is here. Watchers get a workload in its stored state.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Workload] = {}
        self._by_worker: dict[str, dict[str, None]] = {}
        self._by_name: dict[str, dict[str, None]] = {}
        self._on_disk: dict[str, Workload | None] = {}
        """By id, while a workload is being stored: as it is on disk. None: not there, or ended."""
        self._writes: Counter[str] = Counter()
        """Writes under way, by id of the workload."""
        self._writes_ended: dict[str, asyncio.Event] = {}
        """By id of the workload, while a caller waits for the end of its writes."""

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

    @contextmanager
    def being_stored(
        self, before: Mapping[str, Workload | None], after: Mapping[str, Workload]
    ) -> Iterator[None]:
        """The context of a write. At its end, the new states count as stored. A refusal undoes them.

        Args:
            before: By id: each workload before this change. None: there was none that had not ended.
            after: By id: each workload as it is written.
        """
        for workload_id, workload in before.items():
            self._on_disk.setdefault(workload_id, workload)
            self._writes[workload_id] += 1
        try:
            yield
            for workload_id, workload in after.items():
                self._on_disk[workload_id] = None if is_ended(workload.status.state) else workload
        except FleetError:
            for workload_id, workload in after.items():
                self._undo(workload_id, workload, before[workload_id])
            raise
        finally:
            for workload_id in before:
                self._writes[workload_id] -= 1
                if not self._writes[workload_id]:
                    del self._writes[workload_id], self._on_disk[workload_id]
                    if (ended := self._writes_ended.pop(workload_id, None)) is not None:
                        ended.set()

    def _undo(self, workload_id: str, refused: Workload, before: Workload | None) -> None:
        """Undoes a change that the store refused, unless a newer change was made.

        An earlier change that is still being stored stays. Otherwise the workload is again as on disk, so a
        repeated report is new again.
        """
        newest = None if is_ended(refused.status.state) else refused
        if self._by_id.get(workload_id) is not newest:
            return
        self.pop(workload_id, None)
        kept = before if self._writes[workload_id] > 1 else self._on_disk[workload_id]
        if kept is not None:
            self[workload_id] = kept

    def is_being_stored(self, workload_id: str) -> bool:
        """Whether a write of the workload is under way."""
        return workload_id in self._writes

    async def wait_stored(self, workload_id: str) -> None:
        """Waits until the writes of the workload that are under way have succeeded or failed."""
        if self.is_being_stored(workload_id):
            await self._writes_ended.setdefault(workload_id, asyncio.Event()).wait()

    def on_disk(self, workload_id: str) -> Workload | None:
        """The workload as it is on disk. None: not there, or ended."""
        if workload_id in self._on_disk:
            return self._on_disk[workload_id]
        return self._by_id.get(workload_id)

    def ids_on_disk(self) -> list[str]:
        """Ids of the workloads that are on disk and have not ended."""
        return [one for one in {**self._by_id, **self._on_disk} if self.on_disk(one) is not None]
