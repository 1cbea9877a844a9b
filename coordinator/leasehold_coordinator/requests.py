"""What clients may ask of workloads: checked, and turned into commands."""

import asyncio
import re
import secrets
import uuid
from collections.abc import Iterable
from typing import Final, final

from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, fleet_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, Operation
from leasehold.v1.fleet_pb2 import CreateWorkloadRequest
from leasehold.v1.workload_pb2 import Workload, WorkloadState

from leasehold_coordinator.clock import duration, now_timestamp
from leasehold_coordinator.dispatch import Dispatcher
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.finishing import finish
from leasehold_coordinator.fleet import Fleet
from leasehold_coordinator.planner import Candidate, check_named_gpus, choose_worker
from leasehold_coordinator.registry import KnownWorker
from leasehold_coordinator.workload_states import is_ended, state_name

SHORT_TIMEOUT_S: Final = 60.0
"""Default of commands that move no memory."""

LONG_TIMEOUT_S: Final = 600.0
"""Default of commands that move memory: 80 GB take 40 s to park."""

SPEC_LIMIT_BYTES: Final = 131_072
"""Half of what a frame holds."""

COMMAND_LIMIT_BYTES: Final = 196_608
"""What a frame holds, less a quarter. A command that is too large would end its worker's stream each time."""

TIMEOUT_LIMIT_S: Final = 7 * 86_400
"""A week."""

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
SUSPENDED: Final = workload_pb2.WORKLOAD_STATE_SUSPENDED
WEDGED: Final = workload_pb2.WORKLOAD_STATE_WEDGED
UNKNOWN: Final = workload_pb2.WORKLOAD_STATE_UNKNOWN

PARKABLE: Final = frozenset({RUNNING, SUSPENDED})
STOPPABLE: Final = frozenset({RUNNING, SUSPENDED, WEDGED, UNKNOWN})


@final
class Requests:
    """Creates commands, one at a time: a check holds until what it allowed is stored."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._lock = asyncio.Lock()

    async def create_workload(self, request: CreateWorkloadRequest) -> tuple[Workload, Command | None]:
        """Creates a workload and the command that starts it.

        Raises:
            FleetError: It is refused, and nothing was created.
        """
        return await finish(self._create_workload(request))

    async def _create_workload(self, request: CreateWorkloadRequest) -> tuple[Workload, Command | None]:
        async with self._lock:
            before = await self._repeated(request.request_id)
            if before is not None:
                return await self._fleet.find_workload(before.workload_id), before
            workload = self._new_workload(request)
            self._dispatcher.check_room(workload.worker_id, workload.workload_id)
            run = command_pb2.RunOperation(
                name=workload.name, spec=workload.spec, gpu_uuids=request.gpu_uuids
            )
            command = self._new_command(
                request.request_id,
                workload,
                Operation(run=run),
                request.timeout if request.HasField("timeout") else duration(SHORT_TIMEOUT_S),
            )
            if request.validate_only:
                return workload, None
            await self._dispatcher.create(command, workload)
            return workload, command

    async def operate(
        self,
        *,
        request_id: str,
        workload: str,
        operation: Operation,
        expected_generation: int | None,
        timeout: duration_pb2.Duration | None,
        validate_only: bool = False,
    ) -> Command | None:
        """Creates a command for a workload that exists; None with ``validate_only``.

        Raises:
            FleetError: It is refused, and nothing was created.
        """

        async def create() -> Command | None:
            async with self._lock:
                before = await self._repeated(request_id)
                if before is not None:
                    return before
                found = await self._fleet.find_workload(workload)
                self._dispatcher.check_room(found.worker_id, found.workload_id)
                self._check_operation(found, operation, expected_generation)
                default_s = SHORT_TIMEOUT_S if operation.HasField("stop") else LONG_TIMEOUT_S
                command = self._new_command(request_id, found, operation, timeout or duration(default_s))
                if expected_generation is not None:
                    command.expected_generation = expected_generation
                if validate_only:
                    return None
                await self._dispatcher.create(command)
                return command

        return await finish(create())

    async def _repeated(self, request_id: str) -> Command | None:
        """What an earlier request with this id created."""
        if not request_id:
            return None
        for stored in self._fleet.commands.values():
            if stored.command.request_id == request_id:
                return stored.command
        return await self._fleet.store.find_request(request_id)

    def _new_workload(self, request: CreateWorkloadRequest) -> Workload:
        spec = request.spec
        if not spec.arguments or not spec.arguments[0]:
            raise invalid("spec.arguments", "a workload needs a program: give its arguments")
        if spec.ByteSize() > SPEC_LIMIT_BYTES:
            raise invalid(
                "spec",
                f"the spec has {spec.ByteSize()} bytes, and {SPEC_LIMIT_BYTES} fit: put more into a file",
            )
        workload_id = f"w-{secrets.token_hex(6)}"
        workload = Workload(
            workload_id=workload_id,
            name=self._new_name(request.name, workload_id),
            worker_id=self._choose_worker(request).worker_id,
            spec=spec,
            status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_PENDING),
            create_time=now_timestamp(),
        )
        if request.gpu_uuids:
            workload.spec.resources.gpu_count = len(request.gpu_uuids)
        return workload

    def _new_name(self, wanted: str, workload_id: str) -> str:
        if not wanted:
            return workload_id
        if not _NAME.fullmatch(wanted):
            raise invalid(
                "name",
                f"{wanted!r} is no name: take a letter, then letters, digits, '-', '_' or '.', 63 in all",
            )
        if any(workload.name == wanted for workload in self._fleet.workloads.values()):
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
                f"a workload named {wanted!r} has not ended: stop it, or choose another name",
                field="name",
            )
        return wanted

    def _choose_worker(self, request: CreateWorkloadRequest) -> Candidate:
        registry = self._fleet.registry
        wanted = [registry.find(request.worker)] if request.worker else registry.all()
        if request.worker:
            self._require_contact(wanted[0].hello.worker_id)
        candidates = [
            Candidate(
                known.hello.worker_id,
                known.hello.name,
                self._free_gpus(known),
                self._promised(known),
            )
            for known in wanted
            if self._fleet.is_in_contact(known.hello.worker_id)
        ]
        if request.gpu_uuids:
            return check_named_gpus(candidates, list(request.gpu_uuids), request.spec.resources.gpu_count)
        return choose_worker(candidates, request.spec.resources.gpu_count)

    def _free_gpus(self, known: KnownWorker) -> dict[str, bool]:
        """Whether each GPU of a worker is free and not named by a command that has not ended."""
        opened = self._fleet.open_commands_of(worker_id=known.hello.worker_id)
        named = {uuid for stored in opened for uuid in named_gpus(stored.command.operation)}
        free = set(known.free_gpu_uuids) - named
        return {gpu.gpu.uuid: gpu.gpu.uuid in free for gpu in self._fleet.registry.gpus(known)}

    def _promised(self, known: KnownWorker) -> int:
        """Free GPUs of a worker that commands which have not ended may still take, without naming them."""
        promised = 0
        for stored in self._fleet.open_commands_of(worker_id=known.hello.worker_id):
            command = stored.command
            settled = max(known.held_gpus(command.workload_id), len(named_gpus(command.operation)))
            promised += max(0, self._wanted_gpus(command) - settled)
        return promised

    def _wanted_gpus(self, command: Command) -> int:
        if command.operation.HasField("run"):
            return command.operation.run.spec.resources.gpu_count
        workload = self._fleet.workloads.get(command.workload_id)
        if command.operation.HasField("restore") and workload is not None:
            return len(workload.status.parked_gpu_uuids)
        return 0

    def _require_contact(self, worker_id: str) -> None:
        if self._fleet.is_in_contact(worker_id):
            return
        known = self._fleet.registry.get(worker_id)
        name = known.hello.name if known else worker_id
        state = fleet_pb2.WorkerState.Name(self._fleet.worker(known).state)[13:] if known else "unknown"
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            f"worker {name} is {state}: start it again, or wait until it is back",
            worker=name,
        )

    def _check_operation(
        self, workload: Workload, operation: Operation, expected_generation: int | None
    ) -> None:
        generation = workload.status.generation
        if expected_generation is not None and expected_generation != generation:
            raise FleetError(
                errors_pb2.ERROR_REASON_GENERATION_MISMATCH,
                f"workload {workload.name} has generation {generation}, not {expected_generation}: "
                "it has changed, so read it again",
            )
        match operation.WhichOneof("kind"):
            case "suspend":
                _require_state(workload, PARKABLE, "suspended")
            case "restore":
                moves = bool(operation.restore.gpu_uuids or operation.restore.pairs)
                _require_state(workload, {SUSPENDED} if moves else PARKABLE, "restored")
            case "remap":
                _require_state(workload, {RUNNING}, "remapped")
            case "stop":
                if not is_ended(workload.status.state):
                    _require_state(workload, STOPPABLE, "stopped")
            case kind:
                raise ValueError(f"{kind} is not an operation on a workload that exists")
        self._require_contact(workload.worker_id)

    def _new_command(
        self, request_id: str, workload: Workload, operation: Operation, timeout: duration_pb2.Duration
    ) -> Command:
        if not 0 < timeout.ToNanoseconds() <= TIMEOUT_LIMIT_S * 10**9:
            raise invalid(
                "timeout",
                f"a timeout of {timeout.ToNanoseconds() / 1e9:g} s is out of range: "
                f"give more than 0 and at most {TIMEOUT_LIMIT_S} s",
            )
        command = Command(
            command_id=f"c-{uuid.uuid4().hex[:16]}",
            request_id=request_id,
            worker_id=workload.worker_id,
            workload_id=workload.workload_id,
            operation=operation,
            timeout=timeout,
        )
        if command.ByteSize() > COMMAND_LIMIT_BYTES:
            raise invalid(
                "operation",
                f"the command has {command.ByteSize()} bytes, and {COMMAND_LIMIT_BYTES} fit: ask for less",
            )
        return command


def named_gpus(operation: Operation) -> set[str]:
    """UUIDs of the GPUs that an operation names as those to take."""
    match operation.WhichOneof("kind"):
        case "run":
            return set(operation.run.gpu_uuids)
        case "restore":
            return {*operation.restore.gpu_uuids, *(pair.new_uuid for pair in operation.restore.pairs)}
        case "remap":
            return {pair.new_uuid for move in operation.remap.moves for pair in move.pairs}
        case _:
            return set()


def _require_state(workload: Workload, states: Iterable[WorkloadState.ValueType], verb: str) -> None:
    if workload.status.state not in states:
        wanted = " or ".join(sorted(state_name(state) for state in states))
        remedy = "; stop it, nothing else helps" if workload.status.state == WEDGED else ""
        raise FleetError(
            errors_pb2.ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is {state_name(workload.status.state)}: "
            f"only one that is {wanted} can be {verb}{remedy}",
            observed_state=state_name(workload.status.state),
        )
