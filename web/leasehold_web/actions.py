"""What a user may do on the page, as requests of the API: first as a plan, then as a command."""

from typing import Final, TypeAlias, final

import grpc
import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from leasehold.v1.access_service_pb2 import WhoAmIRequest
from leasehold.v1.command_service_pb2 import CancelCommandRequest
from leasehold.v1.fleet_service_pb2 import CordonRequest, UncordonRequest
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.operation_pb2 import (
    CordonOperation,
    Move,
    RemapOperation,
    RestoreOperation,
    StopOperation,
    SuspendOperation,
    UncordonOperation,
)
from leasehold.v1.workload_service_pb2 import (
    PlanRequest,
    RemapWorkloadsRequest,
    RestoreWorkloadRequest,
    StopWorkloadRequest,
    SuspendWorkerRequest,
    SuspendWorkloadRequest,
)

from leasehold_web.documents import Document, document
from leasehold_web.entries import Api
from leasehold_web.refusals import refusal

CALL_TIMEOUT_S: Final = 15.0
PLAN_TIMEOUT_S: Final = 30.0
"""A plan asks the worker."""

GPU_LIMIT: Final = 256
MOVE_LIMIT: Final = 16
REASON_LIMIT: Final = 256
GRACE_LIMIT_S: Final = 3600


class _Action(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="action"):
    """An action as the page sends it. ``request_id`` makes a repetition harmless."""

    request_id: str = ""


class Suspend(_Action, frozen=True, kw_only=True, tag="suspend"):
    """Suspends a workload."""

    workload: str


class Restore(_Action, frozen=True, kw_only=True, tag="restore"):
    """Restores a workload, on these GPUs or on any."""

    workload: str
    gpu_uuids: list[str] = []


class OneMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The destination of one workload: pairs of old and new UUIDs."""

    workload: str
    pairs: list[tuple[str, str]]


class Remap(_Action, frozen=True, kw_only=True, tag="remap"):
    """Moves workloads. A swap has two moves."""

    moves: list[OneMove]


class Stop(_Action, frozen=True, kw_only=True, tag="stop"):
    """Stops a workload."""

    workload: str
    grace_s: int = 10
    force: bool = False


class Cordon(_Action, frozen=True, kw_only=True, tag="cordon"):
    """Cordons GPUs, or the whole worker."""

    worker: str
    reason: str
    gpu_uuids: list[str] = []


class Uncordon(_Action, frozen=True, kw_only=True, tag="uncordon"):
    """Uncordons GPUs, or the whole worker."""

    worker: str
    gpu_uuids: list[str] = []


class Drain(_Action, frozen=True, kw_only=True, tag="drain"):
    """Cordons a worker, and suspends its workloads."""

    worker: str
    reason: str


class Cancel(_Action, frozen=True, kw_only=True, tag="cancel"):
    """Cancels a command."""

    command: str


Action: TypeAlias = Suspend | Restore | Remap | Stop | Cordon | Uncordon | Drain | Cancel

_DECODER: Final = msgspec.json.Decoder(Action)


def read_action(data: bytes) -> Action:
    """Reads an action.

    Raises:
        ValueError: It has another form. The message names the field.
    """
    action: Action = _DECODER.decode(data)
    gpus = getattr(action, "gpu_uuids", [])
    if len(gpus) > GPU_LIMIT or (isinstance(action, Remap) and not 1 <= len(action.moves) <= MOVE_LIMIT):
        raise ValueError(f"an action names at most {GPU_LIMIT} GPUs and 1 to {MOVE_LIMIT} moves")
    if isinstance(action, Cordon | Drain) and not 1 <= len(action.reason.strip()) <= REASON_LIMIT:
        raise ValueError(f"a cordon needs a reason of 1 to {REASON_LIMIT} characters: say why")
    if isinstance(action, Stop) and not 0 <= action.grace_s <= GRACE_LIMIT_S:
        raise ValueError(f"a grace has 0 to {GRACE_LIMIT_S} seconds")
    return action


async def plan(api: Api, action: Action) -> list[Document]:
    """The dry run of an action: a plan for each of its workloads, with the workload's id and name.

    A stop, a cordon and a cancellation have no plan, since nothing but their command decides about them.

    Raises:
        grpc.aio.AioRpcError: The API refuses the plan itself.
    """
    match action:
        case Suspend():
            return [await _plan(api, PlanRequest(workload=action.workload, suspend=SuspendOperation()))]
        case Restore():
            operation = RestoreOperation(gpu_uuids=action.gpu_uuids)
            return [await _plan(api, PlanRequest(workload=action.workload, restore=operation))]
        case Remap():
            return [await _plan(api, PlanRequest(remap=_remap(action)))]
        case _:
            return []


async def _plan(api: Api, request: PlanRequest) -> Document:
    response = await api.workloads.Plan(request, metadata=api.metadata, timeout=PLAN_TIMEOUT_S)
    return document(response.plan)


def _remap(action: Remap) -> RemapOperation:
    return RemapOperation(
        moves=[
            Move(
                workload_id=move.workload,
                pairs=[GpuPair(old_uuid=old, new_uuid=new) for old, new in move.pairs],
            )
            for move in action.moves
        ]
    )


@final
class Outcome(msgspec.Struct, frozen=True):
    """The commands of an action, and the workloads that it leaves as they are."""

    commands: list[Document]
    refusals: list[Document] = []
    problem: str = ""
    """Why the later part of the action failed. Empty: it did not."""


async def carry_out(api: Api, action: Action) -> Outcome:
    """Asks the coordinator for an action.

    Raises:
        grpc.aio.AioRpcError: The API refuses it.
    """
    request_id = action.request_id
    match action:
        case Suspend():
            suspended = await api.workloads.SuspendWorkload(
                SuspendWorkloadRequest(
                    request_id=request_id, workload=action.workload, operation=SuspendOperation()
                ),
                metadata=api.metadata,
                timeout=CALL_TIMEOUT_S,
            )
            return _one(suspended.command)
        case Restore():
            restored = await api.workloads.RestoreWorkload(
                RestoreWorkloadRequest(
                    request_id=request_id,
                    workload=action.workload,
                    operation=RestoreOperation(gpu_uuids=action.gpu_uuids),
                ),
                metadata=api.metadata,
                timeout=CALL_TIMEOUT_S,
            )
            return _one(restored.command)
        case Remap():
            remapped = await api.workloads.RemapWorkloads(
                RemapWorkloadsRequest(request_id=request_id, operation=_remap(action)),
                metadata=api.metadata,
                timeout=CALL_TIMEOUT_S,
            )
            return _one(remapped.command)
        case Stop():
            operation = StopOperation(grace=Duration(seconds=action.grace_s), force=action.force)
            stopped = await api.workloads.StopWorkload(
                StopWorkloadRequest(request_id=request_id, workload=action.workload, operation=operation),
                metadata=api.metadata,
                timeout=CALL_TIMEOUT_S,
            )
            return _one(stopped.command)
        case Cordon():
            return _one(await _cordon(api, action, action.gpu_uuids))
        case Uncordon():
            uncordoned = await api.fleet.Uncordon(
                UncordonRequest(
                    request_id=request_id,
                    worker=action.worker,
                    operation=UncordonOperation(gpu_uuids=action.gpu_uuids),
                ),
                metadata=api.metadata,
                timeout=CALL_TIMEOUT_S,
            )
            return _one(uncordoned.command)
        case Drain():
            # First the cordon, so that nothing takes the freed GPUs.
            cordoned = await _cordon(api, action, [])
            try:
                drained = await api.workloads.SuspendWorker(
                    SuspendWorkerRequest(worker=action.worker, operation=SuspendOperation()),
                    metadata=api.metadata,
                    timeout=CALL_TIMEOUT_S,
                )
            except grpc.aio.AioRpcError as error:  # an error of the whole drain would hide the stored cordon
                return Outcome([document(cordoned)], problem=_problem_of_drain(refusal(error)))
            commands = [document(cordoned), *map(document, drained.commands)]
            return Outcome(commands, [document(one) for one in drained.refusals])
        case Cancel():
            cancelled = await api.commands.CancelCommand(
                CancelCommandRequest(command_id=action.command),
                metadata=api.metadata,
                timeout=CALL_TIMEOUT_S,
            )
            return _one(cancelled.command)


def _problem_of_drain(error: Document) -> str:
    """Why no workload was suspended after a cordon. An error of storage or transport leaves that open."""
    is_certain = error["reason"] not in ("", "STORAGE_UNAVAILABLE")
    what = "Nothing was suspended" if is_certain else "It is unknown whether workloads were suspended"
    return f"{what} after the cordon: {error['message']}"


async def _cordon(api: Api, action: Cordon | Drain, gpu_uuids: list[str]) -> Message:
    caller = await api.access.WhoAmI(WhoAmIRequest(), metadata=api.metadata, timeout=CALL_TIMEOUT_S)
    by = caller.on_behalf_of or caller.identity
    response = await api.fleet.Cordon(
        CordonRequest(
            request_id=action.request_id,
            worker=action.worker,
            operation=CordonOperation(gpu_uuids=gpu_uuids, reason=action.reason, cordoned_by=by),
        ),
        metadata=api.metadata,
        timeout=CALL_TIMEOUT_S,
    )
    return response.command


def _one(command: Message) -> Outcome:
    return Outcome([document(command)])
