"""Keeps a model current: watches, measurements, and new snapshots after each outage."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Final, TypeVar, final

from leasehold.v1.worker_pb2 import FleetGpu

from leasehold_client.aio.client import AsyncClient
from leasehold_client.aio.retry import is_outage
from leasehold_client.errors import LeaseholdError
from leasehold_client.top.contact import Contact
from leasehold_client.top.fleet_model import FleetModel

BEAT_S: Final = 2.0
"""Time between two looks at the coordinator, each with new measurements of the visible GPUs."""

REFUSED_S: Final = 5.0
"""Time before a watch that the coordinator refused is opened again."""

MEASURED_LIMIT: Final = 40
"""Largest number of hosts whose measurements are read at once: more than a terminal has open rows."""

Response = TypeVar("Response")


class _OutageEndedError(Exception):
    """The coordinator was away, so its watches may have missed changes."""


@final
class FleetFeed:
    """Runs the watches. After an outage, each watch begins with a new snapshot.

    Short interruptions of a watch that no call notices are resumed by the client, from the last token.

    Args:
        client: The client. Its ``on_wait`` calls :meth:`Contact.failed`.
        model: The model to keep current.
        contact: The state of the connection.
        visible: Ids of the workers whose GPUs are visible.
    """

    def __init__(
        self,
        client: AsyncClient,
        model: FleetModel,
        contact: Contact,
        visible: Callable[[], Collection[str]],
    ) -> None:
        self._client = client
        self._model = model
        self._contact = contact
        self._visible = visible

    async def run(self) -> None:
        """Keeps the model current until it is cancelled."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    for follow in (self._follow_fleet, self._follow_workloads, self._follow_commands):
                        group.create_task(follow())
                    group.create_task(self._beat())
            except* _OutageEndedError:
                self._contact.refusals.clear()

    async def _follow_fleet(self) -> None:
        await self._follow(self._model.begin_fleet, self._model.fold_fleet, self._client.watch_fleet)

    async def _follow_workloads(self) -> None:
        model = self._model
        await self._follow(model.begin_workloads, model.fold_workloads, self._client.watch_workloads)

    async def _follow_commands(self) -> None:
        model = self._model
        await self._follow(model.begin_commands, model.fold_commands, self._client.watch_commands)

    async def _follow(
        self,
        begin: Callable[[], None],
        fold: Callable[[Response], None],
        watch: Callable[[], AsyncGenerator[Response]],
    ) -> None:
        """Follows a watch. It begins again with a snapshot whenever it ends."""
        refusals = self._contact.refusals
        while True:
            begin()
            try:
                async with aclosing(watch()) as responses:
                    async for response in responses:
                        fold(response)
                        refusals.pop(watch.__name__, None)
            except LeaseholdError as error:
                self._contact.failed(error)
                if error.reason == "INVALID_TOKEN":
                    continue
                if not is_outage(error):
                    refusals[watch.__name__] = error.message
            await asyncio.sleep(REFUSED_S)

    async def _beat(self) -> None:
        """Asks for the caller's role and for measurements, again and again.

        Raises:
            _OutageEndedError: The coordinator answers again after an outage.
        """
        while True:
            try:
                caller = await self._client.who_am_i()
                if self._contact.answered(caller):
                    self._model.begin_snapshots()  # before anybody sees the old entries as current
                    raise _OutageEndedError
                self._model.take_samples(await self._measure())
            except LeaseholdError as error:
                self._contact.failed(error)
            await asyncio.sleep(BEAT_S)

    async def _measure(self) -> Sequence[FleetGpu]:
        """The GPUs of the visible hosts, with their measurements, which no watch tells."""
        visible = list(self._visible())[:MEASURED_LIMIT]
        if not visible:
            return ()
        wanted = " OR ".join(f'worker = "{worker_id}"' for worker_id in visible)
        return await self._client.gpus(filter=wanted)
