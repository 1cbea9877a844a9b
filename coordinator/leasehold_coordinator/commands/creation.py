"""What clients may ask of workloads and workers: checked, and turned into commands."""

import asyncio
import logging
import re
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar, final
from weakref import WeakValueDictionary

from google.protobuf import duration_pb2
from leasehold.v1 import errors_pb2, operation_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.fleet_service_pb2 import (
    CordonRequest,
    ResetGpuHealthRequest,
    UncordonRequest,
)
from leasehold.v1.operation_pb2 import AdoptOperation, Operation
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    CreateWorkloadRequest,
    DeleteCheckpointsRequest,
    SuspendWorkerRequest,
    SuspendWorkerResponse,
    WorkloadRefusal,
)

from leasehold_coordinator.commands.checkpoint_list import find_holders
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.commands.placement import place
from leasehold_coordinator.commands.targets import find_target
from leasehold_coordinator.core.field_rules import check_duration, check_gpu_list
from leasehold_coordinator.core.operation_rules import (
    check_generation,
    check_gpus_of_worker,
    check_one_worker,
    check_operation,
    check_size,
    check_state,
)
from leasehold_coordinator.core.spec_rules import check_spec
from leasehold_coordinator.core.workload_metadata import check_metadata
from leasehold_coordinator.crash_points import crash_point
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.shielding import finish
from leasehold_coordinator.timestamps import duration, now_timestamp

logger = logging.getLogger(__name__)

SHORT_TIMEOUT_S: Final = 60.0
"""Default of commands that move no memory."""

LONG_TIMEOUT_S: Final = 600.0
"""Default of commands that move memory: 80 GB take 40 s to park."""

WorkerRequest: TypeAlias = CordonRequest | UncordonRequest | ResetGpuHealthRequest | DeleteCheckpointsRequest

Created = TypeVar("Created")

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")


@final
@dataclass(frozen=True, slots=True)
class Decision(Generic[Created]):
    """What a request is answered with, once it is stored.

    Attributes:
        created: The answer.
        storing: Stores what was decided, and sends it. None: there is nothing to store.
    """

    created: Created
    storing: Awaitable[None] | None = None


@final
class CommandCreation:
    """Creates commands. Each is decided alone, and stored while others are decided.

    A decision takes the command into the ledger in the turn of the loop in which it was checked, so the next
    decision counts it. Nothing is answered or sent before the command is on disk.
    """

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._deciding = asyncio.Lock()
        self._storing: set[asyncio.Future[None]] = set()
        """One for each creation that was decided and is not on disk yet."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By request id, while a request with it is served."""

    async def _once(self, request_id: str, create: Callable[[], Coroutine[Any, Any, Created]]) -> Created:
        """Serves a request to its end. One with the same id waits, and then finds what this one created."""
        if not request_id:
            return await finish(create())

        async def take_turn() -> Created:
            turn = self._turns.setdefault(request_id, asyncio.Lock())
            async with turn:
                return await create()

        return await finish(take_turn())

    async def _decide(self, decide: Callable[[], Awaitable[Decision[Created]]]) -> Created:
        """Makes a decision, and stores it while others are made.

        A refusal may rest on a creation that is not on disk yet and may fail. The decision is then made again
        once all such creations are on disk or undone. No other decision is made meanwhile.

        Raises:
            FleetError: It is refused, or can't be stored. Nothing was created.
        """
        async with self._deciding:
            try:
                decision = await decide()
            except FleetError:
                if not self._storing:
                    raise
                await self._settle()
                decision = await decide()
            if decision.storing is None:
                return decision.created
            stored = asyncio.get_running_loop().create_future()
            self._storing.add(stored)
        try:
            await decision.storing
        finally:
            self._storing.discard(stored)
            stored.set_result(None)
        crash_point("request-answered")
        return decision.created

    async def _settle(self) -> None:
        """Waits until every creation that was decided is on disk or undone."""
        if self._storing:
            await asyncio.wait(self._storing)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """A context in which no command is decided on, and every decided command is on disk or undone."""
        async with self._deciding:
            await self._settle()
            yield

    async def create_workload(self, request: CreateWorkloadRequest) -> tuple[Workload, Command | None]:
        """Creates a workload and the command that starts it.

        Raises:
            FleetError: It is refused, and nothing was created.
        """
        return await self._once(request.request_id, partial(self._create_workload, request))

    async def _create_workload(self, request: CreateWorkloadRequest) -> tuple[Workload, Command | None]:
        before = await self._created_before(request.request_id)
        if before is not None:
            return before
        holders = await self._holders(request)

        async def decide() -> Decision[tuple[Workload, Command | None]]:
            workload = self._new_workload(request, holders)
            self._dispatcher.check_room(workload.worker_id, [workload.workload_id])
            run = operation_pb2.RunOperation(
                name=workload.name,
                spec=workload.spec,
                gpu_uuids=request.gpu_uuids,
                checkpoint_id=request.checkpoint_id,
            )
            command = self._new_command(
                request.request_id,
                workload.worker_id,
                Operation(run=run),
                request.timeout if request.HasField("timeout") else duration(SHORT_TIMEOUT_S),
                workload.workload_id,
            )
            if request.validate_only:
                return Decision((workload, None))
            return Decision((workload, command), self._dispatcher.create(command, workload))

        return await self._decide(decide)

    async def _holders(self, request: CreateWorkloadRequest) -> set[str] | None:
        """Ids of the workers that have the checkpoint which a workload is to begin with. None: any will do.

        Workers are asked, which takes a while: nothing else waits for that. A worker that the request names,
        itself or by its GPUs, says on its own whether it has it.

        Raises:
            FleetError: UNKNOWN_CHECKPOINT.
        """
        if not request.checkpoint_id or request.worker or request.gpu_uuids:
            return None
        return await find_holders(self._fleet.reader, request.checkpoint_id)

    async def adopt(self, request: AdoptProcessRequest) -> tuple[Workload, Command]:
        """Creates a workload for a process that runs already, and the command that takes it in.

        Raises:
            FleetError: It is refused, and nothing was created.
        """
        return await self._once(request.request_id, partial(self._adopt, request))

    async def _adopt(self, request: AdoptProcessRequest) -> tuple[Workload, Command]:
        before = await self._created_before(request.request_id)
        if before is not None:
            return before

        async def decide() -> Decision[tuple[Workload, Command]]:
            check_operation(Operation(adopt=request.operation))
            workload_id = _workload_id()
            operation = AdoptOperation()
            operation.CopyFrom(request.operation)
            operation.name = self._new_name(request.operation.name, workload_id)
            workload = Workload(
                workload_id=workload_id,
                name=operation.name,
                worker_id=self._fleet.registry.find(request.worker).hello.worker_id,
                status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_PENDING),
                create_time=now_timestamp(),
                origin=workload_pb2.WORKLOAD_ORIGIN_ADOPT,
            )
            self._dispatcher.check_room(workload.worker_id, [workload_id])
            self._fleet.reader.contact(workload.worker_id)
            command = self._new_command(
                request.request_id,
                workload.worker_id,
                Operation(adopt=operation),
                request.timeout if request.HasField("timeout") else duration(SHORT_TIMEOUT_S),
                workload_id,
            )
            return Decision((workload, command), self._dispatcher.create(command, workload))

        return await self._decide(decide)

    async def operate_worker(self, request: WorkerRequest, operation: Operation) -> Command:
        """Creates a command about a worker, its GPUs or what is on its disk.

        Args:
            request: Which worker, and how long it may wait and take: 60 s unless it says so.
            operation: The request's operation.

        Raises:
            FleetError: It is refused, and nothing was created.
        """

        async def decide() -> Decision[Command]:
            check_operation(operation)
            known = self._fleet.registry.find(request.worker)
            worker_id = known.hello.worker_id
            self._fleet.reader.contact(worker_id)
            uuids = {gpu.uuid for gpu in known.hello.gpus}
            check_gpus_of_worker(operation, uuids, known.hello.name)
            self._dispatcher.check_room(worker_id, [])
            timeout = request.timeout if request.HasField("timeout") else duration(SHORT_TIMEOUT_S)
            command = self._new_command(request.request_id, worker_id, operation, timeout)
            return Decision(command, self._dispatcher.create(command))

        return await self._create_command(request.request_id, decide)

    async def _create_command(
        self, request_id: str, decide: Callable[[], Awaitable[Decision[Command]]]
    ) -> Command:
        """Decides on a command, unless an earlier request with this id has created one."""

        async def create() -> Command:
            before = await self._repeated(request_id)
            return before if before is not None else await self._decide(decide)

        return await self._once(request_id, create)

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

        async def decide() -> Decision[Command]:
            target = await find_target(self._fleet.reader, workload, operation)
            check_one_worker(target.workloads)
            self._dispatcher.check_room(target.first.worker_id, target.workload_ids)
            check_generation(target.first, expected_generation)
            for found in target.workloads:
                check_state(found, target.operation)
            self._fleet.reader.contact(target.first.worker_id)
            is_short = operation.WhichOneof("kind") in ("stop", "release")
            command = self._new_command(
                request_id,
                target.first.worker_id,
                target.operation,
                timeout or duration(SHORT_TIMEOUT_S if is_short else LONG_TIMEOUT_S),
                target.first.workload_id,
            )
            if expected_generation is not None:
                command.expected_generation = expected_generation
            return Decision(command, self._dispatcher.create(command))

        return await self._create_command(request_id, decide)

    async def suspend_worker(self, request: SuspendWorkerRequest) -> SuspendWorkerResponse:
        """Creates a suspend for each workload that holds GPUs of a worker and is not parked, oldest first.

        Raises:
            FleetError: The whole of it is refused, and nothing was created.
        """

        async def create() -> SuspendWorkerResponse:
            async with self.alone():  # the answer names commands that earlier requests created
                operation = Operation(suspend=request.operation)
                check_operation(operation)
                known = self._fleet.registry.find(request.worker)
                self._fleet.reader.contact(known.hello.worker_id)
                timeout = request.timeout if request.HasField("timeout") else duration(LONG_TIMEOUT_S)
                check_duration("timeout", timeout)
                async with asyncio.TaskGroup() as tasks:  # their commits are one
                    each = [
                        tasks.create_task(self._suspend(workload, operation, timeout))
                        for workload in self._fleet.reader.holders(known)
                    ]
                crash_point("request-answered")
                results = [task.result() for task in each]
                return SuspendWorkerResponse(
                    commands=[result for result in results if isinstance(result, Command)],
                    refusals=[result for result in results if isinstance(result, WorkloadRefusal)],
                )

        return await finish(create())

    async def _suspend(
        self,
        workload: Workload,
        operation: Operation,
        timeout: duration_pb2.Duration,
    ) -> Command | WorkloadRefusal:
        """Creates one of many suspends, or says why it is refused. What is under way is not asked twice."""
        for stored in self._fleet.ledger.of_workload(workload.workload_id):
            if stored.command.operation == operation:
                return stored.command
        try:
            self._dispatcher.check_room(workload.worker_id, [workload.workload_id])
            check_state(workload, operation)
            command = self._new_command("", workload.worker_id, operation, timeout, workload.workload_id)
            await self._dispatcher.create(command)
        except FleetError as error:
            return WorkloadRefusal(
                workload_id=workload.workload_id, workload_name=workload.name, error=error.to_proto()
            )
        return command

    async def _repeated(self, request_id: str) -> Command | None:
        """What an earlier request with this id created."""
        if not request_id:
            return None
        stored = self._fleet.ledger.of_request(request_id)
        if stored is not None:
            return await self._fleet.reader.find_command(stored.command.command_id)
        return await self._fleet.store.find_request(request_id)

    async def _created_before(self, request_id: str) -> tuple[Workload, Command] | None:
        """The workload that an earlier request with this id created, and its command.

        Raises:
            FleetError: INVALID_ARGUMENT, it created a command that is about no workload.
        """
        before = await self._repeated(request_id)
        if before is None:
            return None
        if not before.workload_id:
            raise invalid(
                "request_id",
                f"the request id {request_id!r} is that of command {before.command_id}, a "
                f"{before.operation.WhichOneof('kind')}: give each request an id of its own",
            )
        return await self._fleet.reader.find_workload(before.workload_id), before

    def _new_workload(self, request: CreateWorkloadRequest, among: set[str] | None) -> Workload:
        spec = request.spec
        check_spec(spec)
        check_metadata("", request.labels, request.annotations)
        check_gpu_list("gpu_uuids", request.gpu_uuids)
        workload_id = _workload_id()
        workload = Workload(
            workload_id=workload_id,
            name=self._new_name(request.name, workload_id),
            worker_id=place(self._fleet.reader, request, among).worker_id,
            spec=spec,
            status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_PENDING),
            create_time=now_timestamp(),
            origin=workload_pb2.WORKLOAD_ORIGIN_RUN,
            labels=request.labels,
            annotations=request.annotations,
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
                f"invalid name {wanted!r}: start with a letter, then use letters, digits, '-', '_' or '.', "
                "63 in all",
            )
        if wanted in self._fleet.workloads or any(
            workload.name == wanted for workload in self._fleet.workloads.values()
        ):
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
                f"a workload with the name or id {wanted!r} has not ended: stop it, or choose another name",
                field="name",
            )
        return wanted

    def _new_command(
        self,
        request_id: str,
        worker_id: str,
        operation: Operation,
        timeout: duration_pb2.Duration,
        workload_id: str = "",
    ) -> Command:
        check_duration("timeout", timeout)
        command = Command(
            command_id=f"c-{uuid.uuid4().hex[:16]}",
            request_id=request_id,
            worker_id=worker_id,
            workload_id=workload_id,
            operation=operation,
            timeout=timeout,
        )
        check_size(command.ByteSize())
        return command


def _workload_id() -> str:
    return f"w-{secrets.token_hex(6)}"
