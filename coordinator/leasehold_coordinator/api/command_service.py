"""CommandService: the commands that the other services created."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import final

from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import (
    CancelCommandRequest,
    CancelCommandResponse,
    GetCommandRequest,
    GetCommandResponse,
    ListCommandsRequest,
    ListCommandsResponse,
    WatchCommandRequest,
    WatchCommandResponse,
    WatchCommandsRequest,
    WatchCommandsResponse,
)
from leasehold.v1.command_service_pb2_grpc import CommandServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.watch_stream import watch
from leasehold_coordinator.command_workloads import workload_ids
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.core.client_views import command_view
from leasehold_coordinator.core.command_states import is_terminal
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.permissions import current_views, require_cancellable
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.filters import matches, named_ids
from leasehold_coordinator.lists.pages import page_request
from leasehold_coordinator.storage.write_health import look_at


@final
class CommandService(CommandServiceServicer):
    """Serves commands from memory and store."""

    def __init__(self, fleet: FleetReader, dispatcher: Dispatcher) -> None:
        self.fleet = fleet
        self._dispatcher = dispatcher

    async def GetCommand(self, request: GetCommandRequest, context: Context) -> GetCommandResponse:
        return GetCommandResponse(command=_seen(await self._find(request.command_id)))

    async def ListCommands(self, request: ListCommandsRequest, context: Context) -> ListCommandsResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.COMMANDS)
        workload_id = None
        if request.workload:
            workload_id = (await self.fleet.find_workload(request.workload)).workload_id
        asked = page_request(request, list_orders.COMMANDS.parse(request.order_by), workload_id or "")
        views = current_views()
        page = await self.fleet.store.lists.commands(
            asked,
            wanted,
            views.command,
            workload_id=workload_id,
            of_workload=[] if workload_id is None else self._open_commands([workload_id], views.command),
            may_match=self._open_commands(named_ids(wanted.condition, "workload"), views.command),
        )
        return ListCommandsResponse(commands=map(_seen, page.items), next_page_token=asked.token(page.last))

    def _open_commands(self, ids: Iterable[str], view: Callable[[Command], Command]) -> list[str]:
        """Ids of the open commands whose further workloads include one of these, as the caller sees them.

        The store finds commands by their first workload only.
        """
        return [
            stored.command.command_id
            for workload_id in ids
            for stored in self.fleet.ledger.of_workload(workload_id)
            if workload_id in workload_ids(view(stored.command))[1:]
        ]

    async def WatchCommand(
        self, request: WatchCommandRequest, context: Context
    ) -> AsyncIterator[WatchCommandResponse]:
        with self.fleet.command_hub.subscribe(request.command_id) as subscription:
            command = await self._find(request.command_id)
            yield WatchCommandResponse(command=_seen(command))
            if is_terminal(command.state):
                return
            async for change in subscription.changes():
                if change is None:
                    continue
                newer = change.message.command
                if newer.revision <= command.revision and not is_terminal(newer.state):
                    continue
                command = newer
                yield WatchCommandResponse(command=current_views().command(command))
                if is_terminal(command.state):
                    return

    async def WatchCommands(
        self, request: WatchCommandsRequest, context: Context
    ) -> AsyncIterator[WatchCommandsResponse]:
        wanted = await read_filter(self.fleet, request.filter, list_fields.COMMANDS)
        worker_id, workload_id = await self.fleet.find_parents(request.worker, request.workload)

        views = current_views()

        def view(response: WatchCommandsResponse) -> WatchCommandsResponse:
            if views.are_whole or not response.HasField("command"):
                return response
            return WatchCommandsResponse(command=views.command(response.command))

        def wants(response: WatchCommandsResponse) -> bool:
            if not response.HasField("command"):
                return True
            command = views.command(response.command) if workload_id is not None else response.command
            return worker_id in (None, command.worker_id) and (
                workload_id is None or workload_id in workload_ids(command)
            )

        def shown(response: WatchCommandsResponse) -> WatchCommandsResponse:
            if response.HasField("command") and not matches(wanted, response.command):
                return WatchCommandsResponse(deleted_command_id=response.command.command_id)
            return response

        responses = watch(
            self.fleet.command_hub,
            WatchCommandsResponse,
            request.resume_token,
            self._snapshot(wants),
            wants=wants,
            scope=views.scope,
            view=view,
            shown=shown,
        )
        async with aclosing(responses):
            async for response in responses:
                yield response

    def _snapshot(
        self, wants: Callable[[WatchCommandsResponse], bool]
    ) -> Iterator[list[tuple[str, WatchCommandsResponse]]]:
        """The commands that have not ended, in their stored states, oldest first."""
        on_disk = self.fleet.ledger.on_disk
        for command_id in list(on_disk):
            if (stored := on_disk.get(command_id)) is not None:
                response = WatchCommandsResponse(command=command_view(stored.command))
                if wants(response):
                    yield [(command_id, response)]

    async def CancelCommand(self, request: CancelCommandRequest, context: Context) -> CancelCommandResponse:
        command = await self._find(request.command_id)
        require_cancellable(command)
        cancelled = await self.fleet.store.health.unless_stalled(
            self._dispatcher.cancel(command), look_at("get commands")
        )
        return CancelCommandResponse(command=_seen(cancelled))

    async def _find(self, command_id: str) -> Command:
        command = await self.fleet.find_command(command_id)
        if command is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNKNOWN_COMMAND,
                f"no command has the id {command_id!r}: `leasehold get commands` lists them",
                field="command_id",
            )
        return command


def _seen(command: Command) -> Command:
    """A command as the caller sees it."""
    return current_views().command(command_view(command))
