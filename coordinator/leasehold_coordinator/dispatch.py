"""The life of commands: stored, sent, followed, ended. Each is sent until its worker has answered."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

from leasehold.v1 import command_pb2, errors_pb2, fleet_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.worker_session_pb2 import CommandAck, CommandFrame, CommandUpdate, ConnectResponse, Hello
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.clock import age_s, now_timestamp
from leasehold_coordinator.command_states import (
    ACCEPTED,
    CANCELLED,
    DISPATCHED,
    EXPIRED,
    FAILED,
    OUTCOMES,
    PENDING,
    RUNNING,
    SUCCEEDED,
    UNKNOWN,
    is_terminal,
    may_follow,
)
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import GONE, Fleet
from leasehold_coordinator.sessions import Session
from leasehold_coordinator.store import StoredCommand, command_row, workload_row

logger = logging.getLogger(__name__)

UNFINISHED_LIMIT: Final = 8
"""Commands of one worker that may be unfinished."""

REPORTED: Final = OUTCOMES | {ACCEPTED, RUNNING}
"""The states that workers report."""


@final
class Dispatcher:
    """Moves commands through their states."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check_room(self, worker_id: str, workload_ids: Sequence[str]) -> None:
        """Refuses a command for workloads of which one is busy, or for a worker that is.

        Raises:
            FleetError: WORKLOAD_BUSY or TOO_MANY_COMMANDS.
        """
        for refusal in self.refusals(worker_id, workload_ids):
            raise refusal

    def refusals(self, worker_id: str, workload_ids: Sequence[str]) -> Iterator[FleetError]:
        """Every command that stands in the way of one for these workloads, and the worker's limit."""
        busy = {
            stored.command.command_id: None
            for workload_id in workload_ids
            for stored in self._fleet.open_commands_of(workload_id=workload_id)
        }
        for command_id in busy:
            yield FleetError(
                errors_pb2.ERROR_REASON_WORKLOAD_BUSY,
                f"command {command_id} has not ended: wait for it, or `leasehold cancel {command_id}`",
                command_id=command_id,
            )
        if len(self._fleet.open_commands_of(worker_id=worker_id)) >= UNFINISHED_LIMIT:
            yield FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
                f"the worker has {UNFINISHED_LIMIT} unfinished commands, which is its limit: try again later",
            )

    async def create(self, command: Command, workload: Workload | None = None) -> None:
        """Stores a command, with the workload that it starts if any, and sends it."""
        command.state = PENDING
        command.revision = 1
        command.create_time.CopyFrom(now_timestamp())
        command.update_time.CopyFrom(command.create_time)
        rows = [command_row(command, "")]
        if workload is not None:
            rows.append(workload_row(workload))
        await self._fleet.store.write(*rows)
        if workload is not None:
            self._fleet.workloads[workload.workload_id] = workload
            self._fleet.workload_hub.publish(workload.workload_id, workload)
        stored = StoredCommand(command, "")
        self._fleet.commands[command.command_id] = stored
        self._fleet.command_hub.publish(command.command_id, command)
        session = self._fleet.sessions.get(command.worker_id)
        if session is not None:
            await self._send(session, stored)

    async def welcome(self, session: Session, hello: Hello) -> None:
        """Settles what an earlier instance of the worker took with it, and sends everything that is open."""
        held = {*hello.commands_in_flight, *hello.commands_unacknowledged}
        for command_id in [
            stored.command.command_id for stored in self._fleet.open_commands_of(worker_id=hello.worker_id)
        ]:
            stored = self._fleet.commands.get(command_id)
            if stored is None:  # it ended while another was being stored
                continue
            sent_before = stored.command.state != PENDING
            lost = stored.instance_id != hello.instance_id and command_id not in held
            if sent_before and lost:
                error = FleetError(
                    errors_pb2.ERROR_REASON_INTERRUPTED,
                    "the worker restarted while it had the command, and does not know what became of it",
                )
                await self._end(stored, FAILED, error.to_proto())
            else:
                await self._send(session, stored)

    async def _send(self, session: Session, stored: StoredCommand) -> None:
        command = stored.command
        if command.state == PENDING:
            command = self._changed(command, DISPATCHED)
        instance_id = session.hello.instance_id
        if command is not stored.command or stored.instance_id != instance_id:
            await self._keep(command, instance_id)
        frame = CommandFrame(epoch=session.epoch, command=command)
        for field in ("result", "error"):
            frame.command.ClearField(field)
        session.send(ConnectResponse(command=frame))

    async def update(self, session: Session, update: CommandUpdate) -> None:
        """Takes in what the worker says of a command. An outcome is acknowledged once it is stored."""
        if update.state not in REPORTED:
            logger.warning("command %s: ignored an update to state %d", update.command_id, update.state)
            return
        for workload in update.workloads:
            await self._fleet.apply_workload(workload, session.hello.worker_id)
        stored = self._fleet.commands.get(update.command_id)
        if stored is not None:
            if update.HasField("result") and session.known is not None:
                self._fleet.registry.apply_result(session.known, update.result)
            await self._apply(stored, update)
        if is_terminal(update.state):
            session.send(ConnectResponse(command_ack=CommandAck(command_id=update.command_id)))

    async def _apply(self, stored: StoredCommand, update: CommandUpdate) -> None:
        command = stored.command
        if not may_follow(command.state, update.state):
            if command.state != update.state:
                logger.warning(
                    "command %s is %s: ignored an update to %s",
                    command.command_id,
                    CommandState.Name(command.state),
                    CommandState.Name(update.state),
                )
            return
        if is_terminal(update.state):
            error = update.error if update.HasField("error") else None
            result = update.result if update.HasField("result") else None
            await self._end(stored, update.state, error, result)
        else:
            await self._keep(self._changed(command, update.state, phase=update.phase), stored.instance_id)

    async def _keep(self, command: Command, instance_id: str) -> None:
        """Keeps an open command as it is now, in memory and in the store, or else as it was in both."""
        before, kept = self._fleet.commands.get(command.command_id), StoredCommand(command, instance_id)
        self._fleet.commands[command.command_id] = kept
        try:
            await self._fleet.save_command(command, instance_id)
        except FleetError:
            if before is not None and self._fleet.commands.get(command.command_id) is kept:
                self._fleet.commands[command.command_id] = before
            raise

    async def _end(
        self,
        stored: StoredCommand,
        state: CommandState.ValueType,
        error: errors_pb2.Error | None = None,
        result: command_pb2.CommandResult | None = None,
    ) -> None:
        self._fleet.commands.pop(stored.command.command_id, None)
        command = self._changed(stored.command, state)
        command.end_time.CopyFrom(command.update_time)
        if error is not None:
            command.error.CopyFrom(error)
        if result is not None:
            command.result.CopyFrom(result)
        workload = self._fleet.workloads.get(command.workload_id)
        try:
            if state != SUCCEEDED and command.operation.HasField("run") and workload is not None:
                await self._fleet.fail_workload(workload, command.error)
            await self._fleet.save_command(command, stored.instance_id)
        except FleetError:  # its outcome comes again, as it is not acknowledged
            self._fleet.commands[command.command_id] = stored
            raise

    def _changed(self, command: Command, state: CommandState.ValueType, phase: str = "") -> Command:
        changed = Command()
        changed.CopyFrom(command)
        changed.state = state
        changed.phase = phase
        changed.ClearField("error")
        changed.revision += 1
        changed.update_time.CopyFrom(now_timestamp())
        return changed

    async def cancel(self, command: Command) -> Command:
        """Cancels a command: at once where it was not sent, else by asking its worker.

        Raises:
            FleetError: WORKER_UNAVAILABLE, its worker can't be asked.
        """
        stored = self._fleet.commands.get(command.command_id)
        if stored is None:
            return command
        if stored.command.state == PENDING:
            error = FleetError(errors_pb2.ERROR_REASON_CANCELLED, "cancelled before it was sent")
            await self._end(stored, CANCELLED, error.to_proto())
            return await self._fleet.store.find_command(command.command_id) or command
        session = self._fleet.sessions.get(stored.command.worker_id)
        if session is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
                "the worker that has the command is out of contact: cancel it when the worker is back",
            )
        frame = CommandFrame(epoch=session.epoch, command=stored.command, cancel=True)
        session.send(ConnectResponse(command=frame))
        return stored.command

    async def tick(self) -> None:
        """Ends what has expired, and marks what nobody can know at present."""
        for command_id in list(self._fleet.commands):
            stored = self._fleet.commands.get(command_id)
            if stored is None:  # it ended while another was being stored
                continue
            command = stored.command
            overdue = age_s(command.create_time) > command.timeout.ToTimedelta().total_seconds()
            if command.state == PENDING and overdue:
                error = FleetError(
                    errors_pb2.ERROR_REASON_EXPIRED,
                    "its worker was not in contact in time: it was certainly not executed",
                )
                await self._end(stored, EXPIRED, error.to_proto())
            elif command.state in (DISPATCHED, ACCEPTED, RUNNING) and self._is_out_of_reach(command, overdue):
                unknown = self._changed(command, UNKNOWN)
                unknown.error.CopyFrom(_OUT_OF_CONTACT.to_proto())
                await self._keep(unknown, stored.instance_id)

    def _is_out_of_reach(self, command: Command, overdue: bool) -> bool:
        known = self._fleet.registry.get(command.worker_id)
        if known is None or known.session_id is not None:
            return False
        state = self._fleet.worker(known).state
        return overdue or state in (fleet_pb2.WORKER_STATE_LOST, fleet_pb2.WORKER_STATE_DISCONNECTED)

    async def reconcile_workloads(self, hello: Hello) -> None:
        """Takes in the workloads of a hello, and fails those that the worker should have and has not."""
        for workload in hello.workloads:
            await self._fleet.apply_workload(workload, hello.worker_id)
        reported = {workload.workload_id for workload in hello.workloads}
        for workload in list(self._fleet.workloads.values()):
            missing = workload.worker_id == hello.worker_id and workload.workload_id not in reported
            if missing and not self._is_being_started(workload):
                await self._fleet.fail_workload(workload, GONE.to_proto())

    def _is_being_started(self, workload: Workload) -> bool:
        open_commands: Iterable[StoredCommand] = self._fleet.open_commands_of(
            workload_id=workload.workload_id
        )
        return any(stored.command.operation.HasField("run") for stored in open_commands)


_OUT_OF_CONTACT: Final = FleetError(
    errors_pb2.ERROR_REASON_OUTCOME_UNKNOWN,
    "the worker is out of contact: the outcome is known when it returns",
)
