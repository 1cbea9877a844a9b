"""What clients may ask of workloads: checked, and turned into commands."""

import asyncio
import re
import secrets
import uuid
from typing import Final, final

from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, Operation
from leasehold.v1.fleet_pb2 import CreateWorkloadRequest
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.clock import duration, now_timestamp
from leasehold_coordinator.crash_points import crash_point
from leasehold_coordinator.dispatch import Dispatcher
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.finishing import finish
from leasehold_coordinator.fleet import Fleet
from leasehold_coordinator.operations import (
    check_duration,
    check_generation,
    check_one_worker,
    check_size,
    check_state,
    named_gpus,
)
from leasehold_coordinator.planner import Candidate, check_named_gpus, choose_worker
from leasehold_coordinator.registry import KnownWorker
from leasehold_coordinator.targets import find_target

SHORT_TIMEOUT_S: Final = 60.0
"""Default of commands that move no memory."""

LONG_TIMEOUT_S: Final = 600.0
"""Default of commands that move memory: 80 GB take 40 s to park."""

SPEC_LIMIT_BYTES: Final = 131_072
"""Half of what a frame holds."""

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")


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
            self._dispatcher.check_room(workload.worker_id, [workload.workload_id])
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
            crash_point("request-answered")
            return workload, command

    async def operate(
        self,
        *,
        request_id: str,
        workload: str,
        operation: Operation,
        expected_generation: int | None,
        timeout: duration_pb2.Duration | None,
    ) -> Command:
        """Creates a command for workloads that exist.

        Args:
            request_id: Makes the call idempotent, unless it is empty.
            workload: Id or name. Unused for a remap, whose moves name theirs.
            operation: What to do.
            expected_generation: The generation of the first workload that the client has seen. None: any.
            timeout: How long it may wait and take. None: as is usual for the operation.

        Raises:
            FleetError: It is refused, and nothing was created.
        """

        async def create() -> Command:
            async with self._lock:
                before = await self._repeated(request_id)
                if before is not None:
                    return before
                target = await find_target(self._fleet, workload, operation)
                check_one_worker(target.workloads)
                self._dispatcher.check_room(target.first.worker_id, target.workload_ids)
                check_generation(target.first, expected_generation)
                for found in target.workloads:
                    check_state(found, target.operation)
                self._fleet.contact(target.first.worker_id)
                default_s = SHORT_TIMEOUT_S if operation.HasField("stop") else LONG_TIMEOUT_S
                command = self._new_command(
                    request_id, target.first, target.operation, timeout or duration(default_s)
                )
                if expected_generation is not None:
                    command.expected_generation = expected_generation
                await self._dispatcher.create(command)
                crash_point("request-answered")
                return command

        return await finish(create())

    async def _repeated(self, request_id: str) -> Command | None:
        """What an earlier request with this id created."""
        if not request_id:
            return None
        stored = self._fleet.ledger.of_request(request_id)
        if stored is not None:
            return await self._fleet.find_command(stored.command.command_id)
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
            self._fleet.contact(wanted[0].hello.worker_id)
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
        opened = self._fleet.ledger.of_worker(known.hello.worker_id)
        named = {uuid for stored in opened for uuid in named_gpus(stored.command.operation)}
        free = set(known.free_gpu_uuids) - named
        return {gpu.gpu.uuid: gpu.gpu.uuid in free for gpu in self._fleet.registry.gpus(known)}

    def _promised(self, known: KnownWorker) -> int:
        """Free GPUs of a worker that commands which have not ended may still take, without naming them."""
        promised = 0
        for stored in self._fleet.ledger.of_worker(known.hello.worker_id):
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

    def _new_command(
        self, request_id: str, workload: Workload, operation: Operation, timeout: duration_pb2.Duration
    ) -> Command:
        check_duration("timeout", timeout)
        command = Command(
            command_id=f"c-{uuid.uuid4().hex[:16]}",
            request_id=request_id,
            worker_id=workload.worker_id,
            workload_id=workload.workload_id,
            operation=operation,
            timeout=timeout,
        )
        check_size(command.ByteSize())
        return command
