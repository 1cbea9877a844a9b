"""Live results of a filter of AIP-160, which the coordinator evaluates."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final, final

from leasehold_client.aio.client import AsyncClient
from leasehold_client.errors import LeaseholdError
from leasehold_client.top.entries import Entries
from leasehold_client.top.rows import Matches

AGAIN_S: Final = 2.0
"""Time before a watch is opened again after an outage."""


@final
class FilterFeed:
    """Follows the selection of one expression, which may be about workers and GPUs, workloads, or both.

    Attributes:
        expression: The expression.
        refusal: The coordinator's messages if neither kind has the expression. Empty: it is accepted.
        revision: Incremented with each change.
    """

    def __init__(self, client: AsyncClient, expression: str) -> None:
        self.expression = expression
        self.refusal = ""
        self.revision = 0
        self._client = client
        self._unanswered = {"fleet", "workloads"}
        self._workers: Entries[None] = Entries()
        self._gpus: Entries[None] = Entries()
        self._workloads: Entries[None] = Entries()

    @property
    def is_answered(self) -> bool:
        """Whether both kinds have told their first selection, or refused the expression."""
        return not self._unanswered

    @property
    def matches(self) -> Matches:
        """The present selection."""
        return Matches(
            frozenset(self._workers.values), frozenset(self._gpus.values), frozenset(self._workloads.values)
        )

    async def run(self) -> None:
        """Keeps the selection current until it is cancelled, or until both kinds refuse the expression."""
        async with asyncio.TaskGroup() as group:
            fleet = group.create_task(self._until_refused("fleet", self._follow_fleet))
            workloads = group.create_task(self._until_refused("workloads", self._follow_workloads))
        of_fleet, of_workloads = fleet.result(), workloads.result()
        # A message about an unknown field lists the fields of one kind. A syntax error has the same for both.
        is_same = of_fleet == of_workloads
        self.refusal = of_fleet if is_same else f"hosts and GPUs: {of_fleet}; workloads: {of_workloads}"
        self.revision += 1

    async def _until_refused(self, kind: str, follow: Callable[[], Awaitable[None]]) -> str:
        """Follows a watch, with a new snapshot whenever it ends. Returns the message of a refused filter."""
        while True:
            try:
                await follow()
            except LeaseholdError as error:
                if error.reason == "INVALID_ARGUMENT":
                    self._unanswered.discard(kind)
                    self.revision += 1
                    return error.message
                if error.reason == "INVALID_TOKEN":
                    continue
            await asyncio.sleep(AGAIN_S)

    async def _follow_fleet(self) -> None:
        self._workers.begin_snapshot()
        self._gpus.begin_snapshot()
        async with aclosing(self._client.watch_fleet(filter=self.expression)) as responses:
            async for response in responses:
                match response.WhichOneof("change"):
                    case "worker":
                        self._workers.put(response.worker.worker_id, None)
                    case "gpu":
                        self._gpus.put(response.gpu.gpu.uuid, None)
                    case "deleted_worker_id":
                        self._workers.remove(response.deleted_worker_id)
                    case "deleted_gpu_uuid":
                        self._gpus.remove(response.deleted_gpu_uuid)
                    case "bookmark" if response.bookmark.snapshot_end:
                        self._workers.end_snapshot()
                        self._gpus.end_snapshot()
                        self._unanswered.discard("fleet")
                self.revision += 1

    async def _follow_workloads(self) -> None:
        self._workloads.begin_snapshot()
        async with aclosing(self._client.watch_workloads(filter=self.expression)) as responses:
            async for response in responses:
                match response.WhichOneof("change"):
                    case "workload":
                        self._workloads.put(response.workload.workload_id, None)
                    case "deleted_workload_id":
                        self._workloads.remove(response.deleted_workload_id)
                    case "bookmark" if response.bookmark.snapshot_end:
                        self._workloads.end_snapshot()
                        self._unanswered.discard("workloads")
                self.revision += 1
