"""Calls to the coordinator that last: watches, waits and output."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    event_service_pb2,
    fleet_service_pb2,
    workload_service_pb2,
)
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.event_service_pb2 import WatchEventsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import ReadWorkloadOutputResponse, WatchWorkloadsResponse

from leasehold_client.aio.command_watch import CommandDeadline, watch_command
from leasehold_client.aio.reader import AsyncReader
from leasehold_client.aio.resumed_watch import resumed_watch
from leasehold_client.aio.retry import has_too_many_streams, is_outage, is_transient, resume
from leasehold_client.aio.workload_watch import Condition, require_condition, wait_workload
from leasehold_client.errors import CommandFailedError, LeaseholdError, NoCoordinatorError, UsageError
from leasehold_client.messages import command_state, operation_name, reason_name, require_timeout
from leasehold_client.request_fields import build


class AsyncWatcher(AsyncReader):
    """A connection to one coordinator, for reads and watches."""

    async def watch_fleet(
        self,
        resume_token: str = "",
        *,
        filter: str = "",  # noqa: A002 - the API's name
    ) -> AsyncGenerator[WatchFleetResponse]:
        """Yields all workers and GPUs, a bookmark, and then each change and deletion, without end.

        An outage of the coordinator is tolerated for 30 s. Tokens are invalid after its restart.

        Args:
            resume_token: The last token of an earlier watch. Empty: a snapshot first.
            filter: Only workers and GPUs that match an AIP-160 expression (docs/api.md). Empty: all.

        Raises:
            LeaseholdError: INVALID_TOKEN: changes were missed. Start again without a token.
                INVALID_ARGUMENT: a bad filter. TOO_MANY_CALLS: the caller has too many streams.
            NoCoordinatorError: The outage lasted longer.
            UsageError: The client has too many watches, waits and outputs.
        """
        request = build(fleet_service_pb2.WatchFleetRequest, resume_token=resume_token, filter=filter)

        def open_stream(token: str) -> AsyncGenerator[WatchFleetResponse]:
            request.resume_token = token
            return self._connection.stream(self._fleet.WatchFleet, request)

        watch = resumed_watch(open_stream, request.resume_token)
        with self._connection.streams.entered():
            async with aclosing(watch) as responses:
                async for response in responses:
                    yield response

    async def watch_workloads(
        self,
        workload: str = "",
        resume_token: str = "",
        *,
        filter: str = "",  # noqa: A002 - the API's name
    ) -> AsyncGenerator[WatchWorkloadsResponse]:
        """Yields the open workloads, a bookmark, and then each change and deletion, without end.

        Args:
            workload: Only the workload with this id or name, ended or not. Empty: all.
            resume_token: As of :meth:`watch_fleet`.
            filter: Only workloads that match, as of :meth:`watch_fleet`.

        Raises:
            LeaseholdError: UNKNOWN_WORKLOAD, or as of :meth:`watch_fleet`.
            NoCoordinatorError: As of :meth:`watch_fleet`.
        """
        request = build(workload_service_pb2.WatchWorkloadsRequest, resume_token=resume_token, filter=filter)

        def open_stream(token: str) -> AsyncGenerator[WatchWorkloadsResponse]:
            request.resume_token = token
            return self._connection.stream(self._workloads.WatchWorkloads, request)

        with self._connection.streams.entered():
            if workload:
                request.workload = await self._workload_id(workload)
            async with aclosing(resumed_watch(open_stream, request.resume_token)) as responses:
                async for response in responses:
                    yield response

    async def watch_commands(
        self,
        *,
        worker: str = "",
        workload: str = "",
        resume_token: str = "",
        filter: str = "",  # noqa: A002 - the API's name
    ) -> AsyncGenerator[WatchCommandsResponse]:
        """Yields the open commands, a bookmark, and then each change and deletion, without end.

        Args:
            worker: Only commands of the worker with this id or name. Empty: all.
            workload: Only commands about the workload with this id or name. Empty: all.
            resume_token: As of :meth:`watch_fleet`.
            filter: Only commands that match, as of :meth:`watch_fleet`.

        Raises:
            LeaseholdError: UNKNOWN_WORKER, UNKNOWN_WORKLOAD, or as of :meth:`watch_fleet`.
            NoCoordinatorError: As of :meth:`watch_fleet`.
        """
        request = build(
            command_service_pb2.WatchCommandsRequest, resume_token=resume_token, worker=worker, filter=filter
        )

        def open_stream(token: str) -> AsyncGenerator[WatchCommandsResponse]:
            request.resume_token = token
            return self._connection.stream(self._commands.WatchCommands, request)

        with self._connection.streams.entered():
            if workload:
                request.workload = await self._workload_id(workload)
            async with aclosing(resumed_watch(open_stream, request.resume_token)) as responses:
                async for response in responses:
                    yield response

    async def watch_events(
        self,
        *,
        worker: str = "",
        workload: str = "",
        resume_token: str = "",
        filter: str = "",  # noqa: A002 - the API's name
    ) -> AsyncGenerator[WatchEventsResponse]:
        """Yields a bookmark, and then each event, without end. :meth:`events` returns earlier events.

        Args:
            worker: Only events of the worker with this id or name. Empty: all.
            workload: Only events of the workload with this id or name. Empty: all.
            resume_token: As of :meth:`watch_fleet`. Empty: from now on.
            filter: Only events that match, as of :meth:`watch_fleet`.

        Raises:
            LeaseholdError: UNKNOWN_WORKER, UNKNOWN_WORKLOAD, or as of :meth:`watch_fleet`.
            NoCoordinatorError: As of :meth:`watch_fleet`.
        """
        request = build(
            event_service_pb2.WatchEventsRequest, resume_token=resume_token, worker=worker, filter=filter
        )

        def open_stream(token: str) -> AsyncGenerator[WatchEventsResponse]:
            request.resume_token = token
            return self._connection.stream(self._events.WatchEvents, request)

        with self._connection.streams.entered():
            if workload:
                request.workload = await self._workload_id(workload)
            async with aclosing(resumed_watch(open_stream, request.resume_token)) as responses:
                async for response in responses:
                    yield response

    async def watch(self, command: Command, *, timeout_s: float | None = None) -> AsyncGenerator[Command]:
        """Yields the command now and after each change, until it has ended.

        An outage of the coordinator is tolerated for 30 s. No error ends the command itself.

        Args:
            command: The command.
            timeout_s: Longest wait, at most 1e9 s. 0: one look. None: until the command has been UNKNOWN for
                30 s beyond its own timeout.

        Raises:
            NoCoordinatorError: The outage lasted longer.
            CommandWaitTimeoutError: The wait is over.
            UsageError: The command is no Command or has no id, or the timeout is negative or too long.
        """
        given: object = command  # a caller without a type checker may pass an id
        if not isinstance(given, Command):
            raise UsageError(f"{given!r} is not a Command: pass what `client.command(id)` returns")
        require_timeout(timeout_s)
        if not command.command_id:
            raise UsageError("the command was only checked (validate_only), so it has no end to wait for")
        deadline = CommandDeadline(command, timeout_s)
        watch = watch_command(partial(self._watch_once, command.command_id), deadline)
        with self._connection.streams.entered():
            async with aclosing(watch) as states:
                async for current in states:
                    yield current

    async def _watch_once(self, command_id: str, timeout_s: float | None) -> AsyncGenerator[Command]:
        request = build(command_service_pb2.WatchCommandRequest, command_id=command_id)
        call = self._connection.stream(self._commands.WatchCommand, request, timeout_s)
        async with aclosing(call) as stream:
            async for response in stream:
                yield response.command
        raise NoCoordinatorError(
            f"{self.address} ended the watch of command {command_id}; the command continues"
        )

    async def wait(self, command: Command, *, timeout_s: float | None = None, check: bool = True) -> Command:
        """Waits until a command has ended, and returns it.

        Args:
            command: The command.
            timeout_s: As of :meth:`watch`.
            check: Whether an end without success raises an error.

        Raises:
            CommandFailedError: The command ended FAILED, REJECTED, CANCELLED or EXPIRED.
            NoCoordinatorError: As of :meth:`watch`.
            CommandWaitTimeoutError: As of :meth:`watch`.
            UsageError: As of :meth:`watch`.
        """
        async with aclosing(self.watch(command, timeout_s=timeout_s)) as states:
            async for current in states:
                command = current
        if check and command.state != command_pb2.COMMAND_STATE_SUCCEEDED:
            raise CommandFailedError(
                f"{operation_name(command)} {command_state(command)}: {command.error.message}",
                reason_name(command.error.reason),
                command,
            )
        return command

    async def wait_workload(
        self, workload: str, condition: Condition = "ready", *, timeout_s: float | None = None
    ) -> Workload:
        """Waits until a workload is ready, has ended or is in a state, and returns the workload.

        An outage of the coordinator is tolerated for 30 s.

        Args:
            workload: Id or name.
            condition: ``ready``: RUNNING, and its program is ready. ``ended``: EXITED, FAILED or RELEASED.
                Or the name of a state, such as ``SUSPENDED``.
            timeout_s: Longest wait, at most 1e9 s. 0: one look. None: no limit.

        Raises:
            WaitTimeoutError: The wait timed out.
            UsageError: The condition does not exist, or the timeout is negative or too long.
            LeaseholdError: UNKNOWN_WORKLOAD, or WRONG_STATE if the workload ended before the condition held.
            NoCoordinatorError: The outage lasted longer.
        """
        require_timeout(timeout_s)
        require_condition(condition)
        with self._connection.streams.entered():
            open_stream = partial(self._watch_workload, await self._workload_id(workload))
            return await wait_workload(open_stream, workload, condition, timeout_s)

    async def _watch_workload(self, workload_id: str, timeout_s: float | None) -> AsyncGenerator[Workload]:
        request = build(workload_service_pb2.WatchWorkloadsRequest, workload=workload_id)
        call = self._connection.stream(self._workloads.WatchWorkloads, request, timeout_s)
        async with aclosing(call) as stream:
            async for response in stream:
                if response.HasField("workload"):
                    yield response.workload
        raise NoCoordinatorError(
            f"{self.address} ended the watch of workload {workload_id}; the workload continues"
        )

    async def output(self, workload: str, *, offset: int = 0, follow: bool = False) -> AsyncGenerator[bytes]:
        """Yields the output of a workload. Arguments and errors as of :meth:`output_parts`."""
        async with aclosing(self.output_parts(workload, offset=offset, follow=follow)) as parts:
            async for part in parts:
                yield part.data

    async def output_parts(
        self, workload: str, *, offset: int = 0, follow: bool = False
    ) -> AsyncGenerator[ReadWorkloadOutputResponse]:
        """Yields the output of a workload in parts, each with the position of the next one.

        A broken stream is resumed at its position, as in :meth:`watch`. A worker that is out of contact is
        an outage too if ``follow`` is set or output has already been read.

        Args:
            workload: Id or name.
            offset: Position of the first byte. Negative: so many bytes before the present end.
            follow: Whether the iteration lasts until the workload has ended.

        Raises:
            LeaseholdError: UNKNOWN_WORKLOAD, WORKER_UNAVAILABLE or OUTPUT_UNAVAILABLE.
            NoCoordinatorError: No coordinator answers, or the outage lasted longer than 30 s.
        """
        request = build(workload_service_pb2.ReadWorkloadOutputRequest, offset=offset, follow=follow)

        def may_reopen(error: LeaseholdError) -> bool:
            if is_outage(error) or has_too_many_streams(error):
                return True
            return is_transient(error) and (follow or request.offset > offset)

        def open_stream() -> AsyncGenerator[ReadWorkloadOutputResponse]:
            return self._connection.stream(self._workloads.ReadWorkloadOutput, request)

        with self._connection.streams.entered():
            request.workload = await self._workload_id(workload)
            async with aclosing(resume(open_stream, may_reopen, is_patient=follow)) as responses:
                async for response in responses:
                    request.offset = response.next_offset
                    yield response

    async def _workload_id(self, workload: str) -> str:
        """The id of a workload, since another workload may get the name while a stream lasts."""
        found = await self.workload(workload)
        return found.workload_id
