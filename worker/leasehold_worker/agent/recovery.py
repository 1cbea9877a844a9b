"""Recovery after a start: the workloads and commands of the worker's earlier run.

The journal only lists what to check. Leases are rebuilt before any claim. Then the driver, /proc and NVML
show the state of every workload, and the end of every interrupted command.
"""

import logging
from collections.abc import Iterable
from typing import Final, final

import msgspec
import trio
from leasehold.v1 import errors_pb2, operation_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.agent.disk_recovery import DiskRecovery
from leasehold_worker.agent.hold_recovery import HoldRecovery
from leasehold_worker.agent.member_recovery import SETTLED, MemberRecovery
from leasehold_worker.byte_sizes import size_text
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.journal import Journal
from leasehold_worker.commands.journal_records import WorkloadRecord, workload_of
from leasehold_worker.commands.ledger import Entry, preempted_by
from leasehold_worker.commands.progress import Progress
from leasehold_worker.crash_points import crash_point
from leasehold_worker.errors import OperationError, StartError, defect
from leasehold_worker.files.workload_files import OUTPUT_FILE
from leasehold_worker.host.processes import boot_id, is_alive
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.programs.programs import abandon, exit_record, launched
from leasehold_worker.workloads.eviction import CHECKPOINT, STOP
from leasehold_worker.workloads.states import CHECKPOINTED, ENDED, FAILED, STOPPED
from leasehold_worker.workloads.workload import Workload, generation_after_start

logger = logging.getLogger(__name__)

FOUND_RUNNING: Final = "the worker restarted during the command and found the program running"
MOVES: Final = frozenset({"hooks", "lock", "checkpoint", "restore"})
"""Phases of the operations that move device memory."""

HOLDING: Final = MOVES | {"image", "resume", "start"}
"""Phases in which GPUs without a lease may be in use."""

ENDING: Final = frozenset({"image", "end", "ending", "start", "resume"})
"""Phases in which the processes of a continuing workload end or are restored."""

STATES_ON_DISK: Final = {CHECKPOINT: CHECKPOINTED, STOP: STOPPED}
"""States of workloads without processes, by strategy."""

END_TIMEOUT_S: Final = 30.0
"""Time for the remaining processes of a workload to end."""


@final
class Recovery:
    """Restores one worker's parts to the state of its earlier run.

    Args:
        parts: The parts, empty.
        journal: The journal of the earlier run.
        commands: The commands, of which unfinished ones are settled.
    """

    def __init__(self, parts: Parts, journal: Journal, commands: Commands) -> None:
        self._parts = parts
        self._commands = commands
        self._contents = journal.contents
        self._interrupted = MemberRecovery(parts)
        self._holds = HoldRecovery(parts.pool.holds, self._contents, commands)
        self._on_disk = DiskRecovery(parts, self._interrupted)
        self._from_image = {each.workload_id for each in self._contents.workloads if _is_from_image(each)}

    def rebuild(self) -> None:
        """Restores workloads and leases, before any claim and before hello."""
        for gpu_uuid, standing in self._contents.standings.items():
            self._parts.pool.slots.restore_standing(gpu_uuid, standing)
        unseen = self._unseen()
        for record in self._contents.workloads:
            self._take_back(record, watched=record.workload_id not in unseen)
        for entry in self._commands.open_entries:
            intent = self._contents.intents.get(entry.command_id)
            if entry.command.operation.run.checkpoint_id or (intent is not None and intent.phase == "start"):
                # A program that was started for a restore still waits for its state, and is ended.
                self._parts.applications.expect_restore(entry.command.workload_id)
            if intent is not None and intent.phase in HOLDING:
                for lease in intent.reserved:
                    self._parts.pool.adopt(lease, reserved=True)
            elif (
                intent is not None
                and intent.phase == "run"
                and entry.command.workload_id not in self._parts.workloads
            ):
                self._take_back_started(entry, intent)
        self._holds.rebuild()
        crash_point("leases-rebuilt")

    def _unseen(self) -> set[str]:
        """Workloads whose first process may have ended by intent: the settlement decides.

        A workload that was being restored from an image is suspended as before, if its processes are gone.
        """
        open_ids = {entry.command_id for entry in self._commands.open_entries}
        return {
            target.workload_id
            for command_id, intent in self._contents.intents.items()
            if command_id in open_ids
            for target in intent.targets
            if intent.phase in ENDING or (intent.phase in MOVES and target.workload_id in self._from_image)
        }

    def _take_back(self, record: WorkloadRecord, *, watched: bool) -> None:
        output_path = self._parts.workloads.folder(record.workload_id) / OUTPUT_FILE
        if record.state in ENDED:
            self._parts.workloads.add(workload_of(record, output_path))
            return
        record = msgspec.structs.replace(record, generation=generation_after_start(record.generation))
        rebooted = record.boot_id != boot_id()
        on_disk = _state_on_disk(record) if (rebooted or record.absent) and watched else None
        if rebooted and watched and on_disk is None and not record.absent:
            self._end_by_reboot(workload_of(record, output_path), record)
            return
        # A workload on disk has no processes, so it needs no lease. An UNKNOWN workload may have had one.
        lease, lost = self._adopt(record.name, record.lease if on_disk is None else None)
        found = msgspec.structs.replace(
            record,
            state=on_disk or record.state,
            absent=record.absent or rebooted,  # after a reboot, the pids are those of other processes
            lease=lease,
            lost_gpu_uuids=record.lost_gpu_uuids + lost,
        )
        workload = workload_of(found, output_path)
        if not workload.absent:
            self._parts.host_shares.take_back(workload)
        if watched:
            self._parts.exit_monitor.add(workload)
        else:
            self._parts.workloads.add(workload)
        logger.info("workload %s: found in the journal, process %d", workload.name, workload.root.pid)

    def _adopt(self, name: str, lease: Lease | None) -> tuple[Lease | None, tuple[str, ...]]:
        """The lease of the GPUs that are still there, and the lost GPUs."""
        if lease is None:
            return None, ()
        adopted = self._parts.pool.adopt(lease)
        lost = tuple(uuid for uuid in lease.gpu_uuids if uuid not in adopted.gpu_uuids)
        if lost:
            logger.error("workload %s holds %s, which this host no longer has", name, ", ".join(lost))
        return (adopted if adopted.gpu_uuids else None), lost

    def _end_by_reboot(self, workload: Workload, record: WorkloadRecord) -> None:
        held = [f"held {', '.join(record.lease.gpu_uuids)}"] if record.lease else []
        if record.parked is not None:
            parked_bytes = sum(record.parked.device_memory_bytes.values())
            held.append(f"had {size_text(parked_bytes)} suspended in host memory, which are lost")
        error = OperationError(
            errors_pb2.ERROR_REASON_HOST_REBOOTED,
            f"the host restarted while workload {workload.name} {' and '.join(held) or 'ran'}: run it again",
        )
        logger.error("%s", error.message)
        self._parts.exit_monitor.end(workload, FAILED, error)
        self._parts.workloads.add(workload)

    def _take_back_started(self, entry: Entry, intent: Intent) -> None:
        """Finds the program of an interrupted run, or makes sure that it never starts."""
        workload_id, run = entry.command.workload_id, entry.command.operation.run
        folder = self._parts.workloads.folder(workload_id)
        try:
            if abandon(folder):
                return
            who, ended = launched(folder), exit_record(folder)
        except OSError as error:
            raise StartError(
                f"the interrupted start of workload {run.name} can't be read or cancelled "
                f"({error.strerror}): check the disk of {folder}"
            ) from error
        if who is None or who.boot_id != boot_id() or (ended is not None and ended.error):
            return
        lease, lost = self._adopt(run.name, intent.reserved[0] if intent.reserved else None)
        workload = self._parts.programs.workload(
            workload_id,
            run.name,
            run.spec,
            who.program,
            lease,
            None,
            entry.command.owner,
            intent.account,
        )
        workload.lose_gpus(lost)
        self._parts.host_shares.take_back(workload)
        self._parts.exit_monitor.add(workload)

    async def settle(self) -> None:
        """Reads the state of every workload, settles begun commands, and begins the others."""
        begun = {
            entry.command_id: intent
            for entry in self._commands.open_entries
            if (intent := self._contents.intents.get(entry.command_id)) is not None
        }
        waiting = {entry.command_id for entry in self._commands.open_entries} - begun.keys()
        concerned = {
            target.workload_id
            for intent in begun.values()
            if intent.phase != "run"
            for target in intent.targets
        }
        async with trio.open_nursery() as nursery:
            for entry in self._commands.open_entries:
                if entry.command_id in begun and not preempted_by(entry.command):
                    nursery.start_soon(self._settle_command, entry, begun[entry.command_id])
            for workload in self._parts.workloads.all():
                if workload.state not in ENDED and workload.workload_id not in concerned:
                    nursery.start_soon(self._look_at, workload)
        self._holds.end_parts(waiting)
        for entry in self._commands.open_entries:  # preempting commands are settled after their suspends
            if entry.command_id in begun and preempted_by(entry.command):
                await self._settle_command(entry, begun[entry.command_id])
        # Read again, since some commands may have been cancelled meanwhile.
        for entry in self._commands.open_entries:
            if entry.command_id in waiting:
                self._commands.resume(entry)

    async def _settle_command(self, entry: Entry, intent: Intent) -> None:
        try:
            error, warning = await self._settle_intent(entry, intent)
        except Exception:
            logger.exception("command %s can't be settled because of a defect", entry.command_id)
            error, warning = defect(), ""
            for target in intent.targets:
                if target.workload_id in self._parts.workloads:
                    self._note_defect(self._parts.workloads.get(target.workload_id))
        await self._holds.settle(entry, error, warning)
        crash_point("command-settled")

    async def _settle_intent(self, entry: Entry, intent: Intent) -> tuple[OperationError | None, str]:
        match intent.phase:
            case "run":
                return await self._settle_run(entry)
            case "stop":
                return await self._settle_stop(entry, intent)
            case "preempt":
                message = "the worker restarted while it suspended workloads: nothing was started"
                return OperationError(errors_pb2.ERROR_REASON_INTERRUPTED, message), ""
            case "save" | "end" | "ending" | "start" | "image" | "resume":
                return await self._on_disk.settle(intent, self._parts.workloads)
            case _:
                return await self._settle_move(entry, intent)

    async def _look_at(self, workload: Workload) -> None:
        """Reads the state of a workload without a running command. A defect affects no other one."""
        try:
            await self._interrupted.look_at(workload)
        except Exception:
            logger.exception("the state of workload %s can't be read because of a defect", workload.name)
            self._note_defect(workload)

    def _note_defect(self, workload: Workload) -> None:
        """Gives an interrupted workload a state from which it can be restored or stopped, and a monitor."""
        if not workload.absent and not self._parts.exit_monitor.watches(workload):
            self._parts.exit_monitor.watch(workload)
        if workload.state not in SETTLED:
            self._parts.workloads.lose(workload, defect())

    async def _settle_run(self, entry: Entry) -> tuple[OperationError | None, str]:
        if entry.command.workload_id in self._parts.workloads:
            return await self._settle_started(entry)
        folder = self._parts.workloads.folder(entry.command.workload_id)
        who, record = launched(folder), exit_record(folder)
        name = entry.command.operation.run.name
        if who is not None and who.boot_id != boot_id():
            return OperationError(
                errors_pb2.ERROR_REASON_HOST_REBOOTED,
                f"the host restarted while workload {name} was being started: run it again",
            ), ""
        if record is not None and record.error:
            return OperationError(
                errors_pb2.ERROR_REASON_SPAWN_FAILED, f"{name} could not be started: {record.error}"
            ), ""
        return OperationError(
            errors_pb2.ERROR_REASON_INTERRUPTED,
            f"{name} was not started because the worker restarted first: run it again",
        ), ""

    async def _settle_started(self, entry: Entry) -> tuple[OperationError | None, str]:
        """Keeps a started program running, unless its application was to be restored first."""
        workload = self._parts.workloads.get(entry.command.workload_id)
        if not entry.command.operation.run.checkpoint_id:
            return None, FOUND_RUNNING
        try:
            stop = operation_pb2.StopOperation()
            await self._parts.termination.stop(workload.workload_id, stop, Progress.unheard())
        except OperationError as error:
            return error, ""
        finally:
            self._parts.applications.forget_restore(workload.workload_id)
        return OperationError(
            errors_pb2.ERROR_REASON_INTERRUPTED,
            f"the worker restarted before {workload.name} was restored from its checkpoint "
            "and ended it: run it again",
        ), ""

    async def _settle_stop(self, entry: Entry, intent: Intent) -> tuple[OperationError | None, str]:
        (target,) = intent.targets
        if target.workload_id in self._parts.workloads:
            workload, stop = self._parts.workloads.get(target.workload_id), entry.command.operation.stop
            try:
                await self._parts.termination.resume(workload, stop, Progress.unheard(), parked=target.parked)
            except OperationError as error:
                return error, ""
        return None, "the worker restarted during the command and then ended the workload"

    async def _settle_move(self, entry: Entry, intent: Intent) -> tuple[OperationError | None, str]:
        workloads = [
            self._parts.workloads.get(target.workload_id)
            for target in intent.targets
            if target.workload_id in self._parts.workloads
        ]
        kind = entry.command.operation.WhichOneof("kind") or "command"
        from_image = [each for each in workloads if each.absent or each.workload_id in self._from_image]
        if kind == "restore" and from_image:
            return await self._on_disk.settle_wake(intent, from_image[0])
        gone = await _ended(workloads)
        living = {workload.workload_id: workload for workload in workloads if workload not in gone}
        left = msgspec.structs.replace(
            intent, targets=tuple(target for target in intent.targets if target.workload_id in living)
        )
        error, warning = await self._interrupted.settle(left, list(living.values()), kind)
        error = await self._on_disk.call_hooks(list(living.values()), kind) or error
        if not gone:
            return error, warning
        names = ", ".join(workload.name for workload in gone)
        reason = gone[0].error.reason if gone[0].error else errors_pb2.ERROR_REASON_TARGET_CRASHED
        found = f"; {error.message}" if error and living else ""
        return OperationError(reason, f"the worker restarted, and workload {names} has ended{found}"), ""


def _state_on_disk(record: WorkloadRecord) -> WorkloadState.ValueType | None:
    """The state of a workload without processes that a restore can start again. None: it has none."""
    return STATES_ON_DISK.get(record.parked.policy.process_strategy) if record.parked is not None else None


def _is_from_image(record: WorkloadRecord) -> bool:
    """Whether the workload had processes that a restore from an image was creating."""
    return record.parked is not None and bool(record.parked.checkpoint_id) and not record.absent


async def _ended(workloads: Iterable[Workload]) -> list[Workload]:
    """The workloads that have ended, after their monitors have noticed."""
    with trio.move_on_after(END_TIMEOUT_S):
        for workload in workloads:
            if not is_alive(workload.root):
                await workload.ended.wait()
    return [workload for workload in workloads if workload.state in ENDED]
