"""Checks the requests of clients about workloads and workers, and turns them into commands."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Final, TypeAlias, final

from google.protobuf import duration_pb2
from google.protobuf.message import Message
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
    ReleaseHoldRequest,
    SuspendWorkerRequest,
    SuspendWorkerResponse,
    WorkloadRefusal,
)

from leasehold_coordinator.commands.checkpoint_list import find_holders, require_own_checkpoints
from leasehold_coordinator.commands.decisions import Decision, Decisions
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.commands.holds import Room, find_room
from leasehold_coordinator.commands.new_commands import new_command, new_name, new_workload_id
from leasehold_coordinator.commands.placement import place
from leasehold_coordinator.commands.plans import check_on_worker
from leasehold_coordinator.commands.request_keys import RequestKey, find_repeated
from leasehold_coordinator.commands.targets import find_hold_worker, find_target
from leasehold_coordinator.commands.user_rules import (
    USER_PRIORITY_LIMIT,
    check_priority,
    check_queue,
    taken_gpus,
)
from leasehold_coordinator.core.field_rules import check_duration, check_gpu_list
from leasehold_coordinator.core.operation_rules import (
    check_generation,
    check_gpus_of_worker,
    check_one_worker,
    check_operation,
    check_size,
    check_state,
)
from leasehold_coordinator.core.secret_variables import blank_secrets
from leasehold_coordinator.core.spec_rules import check_resources, check_spec
from leasehold_coordinator.core.workload_metadata import check_metadata
from leasehold_coordinator.crash_points import crash_point
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.caller_bounds import CallerBounds
from leasehold_coordinator.fleet.callers import owner
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.timestamps import duration, now_timestamp

logger = logging.getLogger(__name__)

SHORT_TIMEOUT_S: Final = 60.0
"""Default timeout of commands that move no memory, and restore no application."""

LONG_TIMEOUT_S: Final = 600.0
"""Default timeout of commands that move memory. A suspend of 80 GB takes 40 s."""

SECRETS_MINOR: Final = 6
"""The first minor version of the protocol in which a worker knows secret variables."""

WorkerRequest: TypeAlias = CordonRequest | UncordonRequest | ResetGpuHealthRequest | DeleteCheckpointsRequest


@final
class CommandCreation:
    """Creates commands: each is checked, decided, stored and sent.

    Args:
        fleet: The fleet.
        dispatcher: Sends commands.
        bounds: Told of the costs of decisions.
        user_priority_limit: The highest priority of users' workloads.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        bounds: CallerBounds,
        user_priority_limit: int = USER_PRIORITY_LIMIT,
    ) -> None:
        self._fleet = fleet
        self._user_priority_limit = user_priority_limit
        self._dispatcher = dispatcher
        self.decisions = Decisions(fleet.store.health, bounds)

    def key(self, request_id: str, request: Message) -> RequestKey:
        """The key of a request, which has this id. Empty: it has none."""
        return RequestKey.of(self._fleet.vault, request_id, request)

    async def create_workload(self, request: CreateWorkloadRequest) -> tuple[Workload, Command | None]:
        """Creates a workload and the command that starts the workload.

        Raises:
            FleetError: The request is refused, and nothing was created.
        """
        key = self.key("" if request.validate_only else request.request_id, request)
        return await self.decisions.once(key.scoped_id, partial(self._create_workload, request, key))

    async def _create_workload(
        self, request: CreateWorkloadRequest, key: RequestKey
    ) -> tuple[Workload, Command | None]:
        before = await self._created_before(key)
        if before is not None:
            return before
        holders = await self._holders(request)

        async def draft() -> tuple[Workload, Command]:
            room = await find_room(self._fleet.reader, request)
            workload = self._new_workload(request, holders, room)
            check_queue(self._fleet.reader, workload.worker_id, request.gpu_uuids)
            self._dispatcher.check_room(workload.worker_id, [workload.workload_id, *room.preempted_ids])
            run = operation_pb2.RunOperation(
                name=workload.name,
                spec=workload.spec,
                gpu_uuids=request.gpu_uuids,
                checkpoint_id=request.checkpoint_id,
                hold_id=request.hold_id,
                preempt=room.preempted_ids,
            )
            is_long = bool(room.preempted_ids or request.checkpoint_id)
            default_s = LONG_TIMEOUT_S if is_long else SHORT_TIMEOUT_S
            command = new_command(
                request.request_id,
                workload.worker_id,
                Operation(run=run),
                request.timeout if request.HasField("timeout") else duration(default_s),
                workload.workload_id,
                [workload.owner, *room.owners],
            )
            return workload, command

        return await self._decide_new(
            draft,
            key,
            is_checked=bool(request.spec.hooks),
            is_real=not request.validate_only,
            secrets=request.spec.secret_environment,
        )

    async def _decide_new(
        self,
        draft: Callable[[], Awaitable[tuple[Workload, Command]]],
        key: RequestKey,
        *,
        is_checked: bool,
        is_real: bool,
        secrets: Mapping[str, str] | None = None,
    ) -> tuple[Workload, Command | None]:
        """Creates a workload and its command, after the worker has checked the request where needed.

        Only the worker knows the rules for hooks. A broken rule refuses the request, not the command.

        Args:
            draft: Makes both, or refuses.
            key: The request's key.
            is_checked: Whether the worker is asked whether the request breaks a rule.
            is_real: False creates nothing, and the worker checks everything. The workload then has no id.
            secrets: Secret variables of the program. Only the command gets the values, encrypted.
        """

        async def preview() -> Decision[tuple[Workload, Command]]:
            return Decision(await draft())

        async def create() -> Decision[tuple[Workload, Command | None]]:
            workload, command = await draft()
            self._seal(command, secrets or {})
            return Decision((workload, command), self._dispatcher.create(command, workload, key.digest))

        if is_checked or not is_real:
            workload, command = await self.decisions.decide(preview)
            await check_on_worker(
                self._fleet.reader,
                workload.worker_id,
                command.operation,
                workload.owner,
                only_the_request=is_real,
            )
        if is_real:
            return await self.decisions.decide(create)
        if workload.name == workload.workload_id:
            workload.name = ""
        for field in ("workload_id", "status", "create_time"):
            workload.ClearField(field)
        return workload, None

    def _seal(self, command: Command, secrets: Mapping[str, str]) -> None:
        """Puts encrypted values of secret variables into a run.

        Raises:
            FleetError: UNSUPPORTED_CAPABILITY: the worker is older than such variables; or INVALID_ARGUMENT.
        """
        if not secrets:
            return
        hello = self._fleet.reader.contact(command.worker_id).hello
        if hello.protocol_version.minor < SECRETS_MINOR:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                f"worker {hello.name} is too old for secret variables: update it, or choose another worker",
                field="spec.secret_environment",
            )
        sealed = command.operation.run.spec.secret_environment
        for name, value in secrets.items():
            sealed[name] = self._fleet.vault.seal(command.workload_id, name, value)
        check_size(command.ByteSize())

    async def _holders(self, request: CreateWorkloadRequest) -> set[str] | None:
        """Ids of the workers that have the checkpoint of a request. None: the choice is not limited.

        The workers are asked before the decision, so no other request waits for their answers. If the request
        names a worker or GPUs, that worker itself refuses a checkpoint that it lacks.

        Raises:
            FleetError: UNKNOWN_CHECKPOINT.
        """
        if not request.checkpoint_id:
            return None
        if request.worker or request.gpu_uuids or request.hold_id or request.preempt:
            await require_own_checkpoints(self._fleet.reader, request.worker, [request.checkpoint_id])
            return None
        return await find_holders(self._fleet.reader, request.checkpoint_id)

    async def adopt(self, request: AdoptProcessRequest) -> tuple[Workload, Command | None]:
        """Creates a workload for a running process, and the command that adopts the process.

        Raises:
            FleetError: The request is refused, and nothing was created.
        """
        key = self.key("" if request.validate_only else request.request_id, request)
        return await self.decisions.once(key.scoped_id, partial(self._adopt, request, key))

    async def _adopt(self, request: AdoptProcessRequest, key: RequestKey) -> tuple[Workload, Command | None]:
        before = await self._created_before(key)
        if before is not None:
            return before

        async def draft() -> tuple[Workload, Command]:
            check_operation(Operation(adopt=request.operation))
            workload_id = new_workload_id()
            operation = AdoptOperation()
            operation.CopyFrom(request.operation)
            operation.name = new_name(
                self._fleet.workloads, "operation.name", request.operation.name, workload_id
            )
            workload = Workload(
                workload_id=workload_id,
                name=operation.name,
                owner=owner(),
                worker_id=self._fleet.registry.find(request.worker).hello.worker_id,
                status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_PENDING),
                create_time=now_timestamp(),
                origin=workload_pb2.WORKLOAD_ORIGIN_ADOPT,
            )
            self._dispatcher.check_room(workload.worker_id, [workload_id])
            self._fleet.reader.contact(workload.worker_id)
            command = new_command(
                request.request_id,
                workload.worker_id,
                Operation(adopt=operation),
                request.timeout if request.HasField("timeout") else duration(SHORT_TIMEOUT_S),
                workload_id,
                [workload.owner],
            )
            return workload, command

        return await self._decide_new(
            draft, key, is_checked=bool(request.operation.hooks), is_real=not request.validate_only
        )

    async def operate_worker(
        self, request: WorkerRequest | ReleaseHoldRequest, operation: Operation
    ) -> Command:
        """Creates a command about a worker, its GPUs, its checkpoints or one of its holds.

        Args:
            request: Has a timeout for wait and execution. The default timeout is 60 s.
            operation: The request's operation.

        Raises:
            FleetError: The request is refused, and nothing was created.
        """
        key = self.key(request.request_id, request)

        async def decide() -> Decision[Command]:
            check_operation(operation)
            if isinstance(request, ReleaseHoldRequest):
                worker = await find_hold_worker(self._fleet.reader, request.hold_id)
            else:
                worker = request.worker
            known = self._fleet.registry.find(worker)
            worker_id = known.hello.worker_id
            self._fleet.reader.contact(worker_id)
            uuids = {gpu.uuid for gpu in known.hello.gpus}
            check_gpus_of_worker(operation, uuids, known.hello.name)
            self._dispatcher.check_room(worker_id, [])
            timeout = request.timeout if request.HasField("timeout") else duration(SHORT_TIMEOUT_S)
            command = new_command(request.request_id, worker_id, operation, timeout)
            return Decision(command, self._dispatcher.create(command, request_digest=key.digest))

        worker = "" if isinstance(request, ReleaseHoldRequest) else request.worker
        return await self._create_command(key, decide, worker, operation.delete_checkpoints.checkpoint_ids)

    async def _create_command(
        self,
        key: RequestKey,
        decide: Callable[[], Awaitable[Decision[Command]]],
        worker: str,
        checkpoint_ids: Collection[str],
        workload: str = "",
    ) -> Command:
        """Decides on a command, unless an earlier request with this id has created a command.

        Args:
            key: The request's key.
            decide: Decides.
            worker: The worker with the checkpoints. Empty: that of the workload, or else any worker.
            checkpoint_ids: The checkpoints, which must be the caller's.
            workload: The workload that starts from a checkpoint, which only its own worker needs to know.
        """

        async def create() -> Command:
            before = await find_repeated(self._fleet.reader, key)
            if before is not None:
                return before
            # Before the decision, so no other request waits for the worker's answer.
            of_worker = worker
            if workload and any(checkpoint_ids):
                of_worker = (await self._fleet.reader.find_workload(workload)).worker_id
            await require_own_checkpoints(self._fleet.reader, of_worker, checkpoint_ids)
            return await self.decisions.decide(decide)

        return await self.decisions.once(key.scoped_id, create)

    async def operate(
        self,
        *,
        key: RequestKey,
        workload: str,
        operation: Operation,
        expected_generation: int | None,
        timeout: duration_pb2.Duration | None,
    ) -> Command:
        """Creates a command for existing workloads.

        Args:
            key: Makes the call idempotent, unless its id is empty.
            workload: Id or name. Unused for a remap: its moves name the workloads.
            operation: What to do.
            expected_generation: The generation that the first workload must have. None: any.
            timeout: Limit for wait and execution together. None: 60 s for a stop or a release, else 600 s.

        Raises:
            FleetError: The request is refused, and nothing was created.
        """

        async def decide() -> Decision[Command]:
            target = await find_target(self._fleet.reader, workload, operation)
            check_one_worker(target.workloads)
            check_queue(self._fleet.reader, target.first.worker_id, taken_gpus(target))
            self._dispatcher.check_room(target.first.worker_id, target.workload_ids)
            check_generation(target.first, expected_generation)
            for found in target.workloads:
                check_state(found, target.operation)
            self._fleet.reader.contact(target.first.worker_id)
            is_short = operation.WhichOneof("kind") in ("stop", "release")
            command = new_command(
                key.request_id,
                target.first.worker_id,
                target.operation,
                timeout or duration(SHORT_TIMEOUT_S if is_short else LONG_TIMEOUT_S),
                target.first.workload_id,
                target.owners,
            )
            if expected_generation is not None:
                command.expected_generation = expected_generation
            return Decision(command, self._dispatcher.create(command, request_digest=key.digest))

        return await self._create_command(key, decide, "", [operation.restore.checkpoint_id], workload)

    async def suspend_worker(self, request: SuspendWorkerRequest) -> SuspendWorkerResponse:
        """Creates a suspend for each workload that holds GPUs of a worker, oldest first.

        Raises:
            FleetError: The whole request is refused, and nothing was created.
        """

        async def create() -> SuspendWorkerResponse:
            async with self.decisions.alone():  # the answer names commands that earlier requests created
                operation = Operation(suspend=request.operation)
                check_operation(operation)
                known = self._fleet.registry.find(request.worker)
                self._fleet.reader.contact(known.hello.worker_id)
                timeout = request.timeout if request.HasField("timeout") else duration(LONG_TIMEOUT_S)
                check_duration("timeout", timeout)
                async with asyncio.TaskGroup() as tasks:  # one commit stores all commands
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

        return await self.decisions.once("", create)

    async def _suspend(
        self,
        workload: Workload,
        operation: Operation,
        timeout: duration_pb2.Duration,
    ) -> Command | WorkloadRefusal:
        """Creates the suspend of one workload, or returns its refusal. Reuses an equal unfinished command."""
        for stored in self._fleet.ledger.of_workload(workload.workload_id):
            if stored.command.operation == operation:
                return stored.command
        try:
            self._dispatcher.check_room(workload.worker_id, [workload.workload_id])
            check_state(workload, operation)
            command = new_command(
                "", workload.worker_id, operation, timeout, workload.workload_id, [workload.owner]
            )
            await self._dispatcher.create(command)
        except FleetError as error:
            return WorkloadRefusal(
                workload_id=workload.workload_id, workload_name=workload.name, error=error.to_proto()
            )
        return command

    async def _created_before(self, key: RequestKey) -> tuple[Workload, Command] | None:
        """The workload that an earlier sending of the same request created, and its command.

        Raises:
            FleetError: REQUEST_ID_REUSED, another request has the id.
        """
        before = await find_repeated(self._fleet.reader, key)
        if before is None:
            return None
        return await self._fleet.reader.find_workload(before.workload_id), before

    def _new_workload(self, request: CreateWorkloadRequest, among: set[str] | None, room: Room) -> Workload:
        spec = request.spec
        check_spec(spec)
        check_priority(spec, self._user_priority_limit)
        check_metadata("", request.labels, request.annotations)
        check_gpu_list("gpu_uuids", request.gpu_uuids)
        if not request.gpu_uuids:
            check_resources(spec.resources)
        workload_id = new_workload_id()
        workload = Workload(
            workload_id=workload_id,
            name=new_name(self._fleet.workloads, "name", request.name, workload_id),
            owner=owner(),
            worker_id=room.worker_id or place(self._fleet.reader, request, among).worker_id,
            spec=spec,
            status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_PENDING),
            create_time=now_timestamp(),
            origin=workload_pb2.WORKLOAD_ORIGIN_RUN,
            labels=request.labels,
            annotations=request.annotations,
        )
        blank_secrets(workload.spec)
        if request.gpu_uuids:
            workload.spec.resources.gpu_count = len(request.gpu_uuids)
        return workload
