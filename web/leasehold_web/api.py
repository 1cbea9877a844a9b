"""The answers for our scripts: reads of the API, plans and actions."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Final, TypeVar

import grpc
import msgspec
from aiohttp import web
from leasehold.v1.access_service_pb2 import WhoAmIRequest
from leasehold.v1.command_service_pb2 import GetCommandRequest, ListCommandsRequest
from leasehold.v1.event_service_pb2 import ListEventsRequest
from leasehold.v1.fleet_service_pb2 import GetWorkerRequest, ListGpusRequest
from leasehold.v1.workload_service_pb2 import (
    GetWorkloadRequest,
    ListCheckpointsRequest,
    ListWorkloadsRequest,
)

from leasehold_web import actions, history
from leasehold_web.answers import CALL_TIMEOUT_S, ID, answer, documents_of
from leasehold_web.documents import Document, document, sample_row
from leasehold_web.entries import LoginRefusedError
from leasehold_web.guards import SESSION, SESSIONS
from leasehold_web.refusals import problem, refusal, status_of
from leasehold_web.streams import stream_refusal

CHECKPOINTS_TIMEOUT_S: Final = 20.0
"""The coordinator waits 10 s for a worker that is silent, and then answers without it."""

PAGE_SIZE: Final = 100
SAMPLES_LIMIT: Final = 64
"""Most workers of one answer with samples: those that a window shows."""

SAMPLE_CALLS: Final = 8

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Found = TypeVar("Found")


def refusals_told(handler: Handler) -> Handler:
    """Turns a refusal of the API into an answer."""

    @wraps(handler)
    async def call(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except LoginRefusedError as error:
            raise problem(503, str(error)) from None
        except grpc.aio.UsageError:  # the server is stopping, or the login has ended, and with it its channel
            raise problem(503, "the page is closing its connection to the coordinator: try again") from None
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:  # revoked, blocked or expired
                await request.app[SESSIONS].close(request[SESSION])
            return web.Response(
                status=status_of(error),
                body=msgspec.json.encode(refusal(error)),
                content_type="application/json",
            )

    return call


async def get_session(request: web.Request) -> web.Response:
    """The caller and its role, and the server's time.

    Also why a further stream is refused: a browser hides this answer of a stream from its page.
    """
    api = await request[SESSION].entry.api()
    found = await api.access.WhoAmI(WhoAmIRequest(), metadata=api.metadata, timeout=CALL_TIMEOUT_S)
    told = document(found) | {"time": 1e3 * time.time()}
    if full := stream_refusal(request):
        told["full"] = full
    return answer(told)


async def get_samples(request: web.Request) -> web.Response:
    """The newest measurements of the GPUs of some workers, by UUID."""
    workers = request.query.getall("worker", [])
    if len(workers) > SAMPLES_LIMIT:
        raise problem(400, f"an answer has the samples of at most {SAMPLES_LIMIT} workers")
    api = await request[SESSION].entry.api()
    places = asyncio.Semaphore(SAMPLE_CALLS)

    async def of_worker(worker: str) -> dict[str, Document]:
        async with places:
            try:
                found = await api.fleet.ListGpus(
                    ListGpusRequest(worker=worker, page_size=256),
                    metadata=api.metadata,
                    timeout=CALL_TIMEOUT_S,
                )
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:  # deleted meanwhile
                    return {}
                raise
            return {one.gpu.uuid: sample_row(one.lease) for one in found.gpus}

    parts = await asyncio.gather(*(of_worker(worker) for worker in workers))
    return answer({uuid: sample for part in parts for uuid, sample in part.items()})


async def get_workloads(request: web.Request) -> web.Response:
    """A page of all workloads, the newest first, also of ended ones."""
    api = await request[SESSION].entry.api()
    page = await api.workloads.ListWorkloads(
        ListWorkloadsRequest(
            include_ended=True, page_size=PAGE_SIZE, page_token=request.query.get("page_token", "")
        ),
        metadata=api.metadata,
        timeout=CALL_TIMEOUT_S,
    )
    workloads = await documents_of(request, page.workloads)
    return answer({"workloads": workloads, "next_page_token": page.next_page_token})


async def get_commands(request: web.Request) -> web.Response:
    """A page of all commands, the newest first."""
    api = await request[SESSION].entry.api()
    page = await api.commands.ListCommands(
        ListCommandsRequest(page_size=PAGE_SIZE, page_token=request.query.get("page_token", "")),
        metadata=api.metadata,
        timeout=CALL_TIMEOUT_S,
    )
    commands = await documents_of(request, page.commands)
    return answer({"commands": commands, "next_page_token": page.next_page_token})


async def get_workload(request: web.Request) -> web.Response:
    """A workload with its commands and events."""
    api, workload_id = await request[SESSION].entry.api(), _id(request)
    found = await api.workloads.GetWorkload(
        GetWorkloadRequest(workload=workload_id), metadata=api.metadata, timeout=CALL_TIMEOUT_S
    )
    workload_id = found.workload.workload_id
    commands, events = await asyncio.gather(
        api.commands.ListCommands(
            ListCommandsRequest(workload=workload_id, page_size=PAGE_SIZE),
            metadata=api.metadata,
            timeout=CALL_TIMEOUT_S,
        ),
        api.events.ListEvents(
            ListEventsRequest(workload=workload_id, page_size=PAGE_SIZE),
            metadata=api.metadata,
            timeout=CALL_TIMEOUT_S,
        ),
    )
    return answer(
        {
            "workload": document(found.workload),
            "commands": await documents_of(request, commands.commands),
            "events": await documents_of(request, events.events),
        }
    )


async def get_checkpoints(request: web.Request) -> web.Response:
    """The checkpoints of a workload on its own worker.

    The answer is the refusal if the caller may not read them, or if the worker was deleted.

    The worker's directory has all checkpoints of the workload. Without the worker in the request, the
    coordinator asks all workers: any silent worker delays the answer, and workers that share a directory
    repeat checkpoints.
    """
    api = await request[SESSION].entry.api()
    try:
        asked = await api.workloads.GetWorkload(
            GetWorkloadRequest(workload=_id(request)), metadata=api.metadata, timeout=CALL_TIMEOUT_S
        )
        found = await api.workloads.ListCheckpoints(
            ListCheckpointsRequest(worker=asked.workload.worker_id, workload=asked.workload.workload_id),
            metadata=api.metadata,
            timeout=CHECKPOINTS_TIMEOUT_S,
        )
    except grpc.aio.AioRpcError as error:
        refused = refusal(error)
        if error.code() != grpc.StatusCode.PERMISSION_DENIED and refused["reason"] != "UNKNOWN_WORKER":
            raise
        return answer({"refusal": refused})
    return answer(
        {
            "checkpoints": await documents_of(request, found.checkpoints),
            "unreachable": list(found.unreachable),
        }
    )


async def get_command(request: web.Request) -> web.Response:
    """A command."""
    api = await request[SESSION].entry.api()
    found = await api.commands.GetCommand(
        GetCommandRequest(command_id=_id(request)), metadata=api.metadata, timeout=CALL_TIMEOUT_S
    )
    return answer(document(found.command))


async def get_worker(request: web.Request) -> web.Response:
    """A worker with its GPUs and events."""
    api = await request[SESSION].entry.api()
    found = await api.fleet.GetWorker(
        GetWorkerRequest(worker=_id(request)), metadata=api.metadata, timeout=CALL_TIMEOUT_S
    )
    worker_id = found.worker.worker_id
    gpus, events = await asyncio.gather(
        api.fleet.ListGpus(
            ListGpusRequest(worker=worker_id, page_size=256), metadata=api.metadata, timeout=CALL_TIMEOUT_S
        ),
        api.events.ListEvents(
            ListEventsRequest(worker=worker_id, page_size=PAGE_SIZE),
            metadata=api.metadata,
            timeout=CALL_TIMEOUT_S,
        ),
    )
    return answer(
        {
            "worker": document(found.worker),
            "gpus": await documents_of(request, gpus.gpus),
            "events": await documents_of(request, events.events),
        }
    )


async def post_plan(request: web.Request) -> web.Response:
    """The dry run of an action."""
    action = await _action(request)
    return answer({"plans": await actions.plan(await request[SESSION].entry.api(), action)})


async def post_action(request: web.Request) -> web.Response:
    """Carries an action out, as far as its command is stored."""
    action = await _action(request)
    return answer(await actions.carry_out(await request[SESSION].entry.api(), action))


async def _action(request: web.Request) -> actions.Action:
    if request.content_type != "application/json":
        raise problem(400, "an action is sent as application/json")
    try:
        return actions.read_action(await request.read())
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise problem(400, f"the action is not valid: {error}") from None


def _id(request: web.Request) -> str:
    found = request.match_info["id"]
    if not ID.fullmatch(found):
        raise problem(
            404,
            f"invalid id or name {found[:100]!r}: open the list of workloads, commands or hosts, and follow "
            "a link",
        )
    return found


def routes() -> list[web.RouteDef]:
    """The routes of this module."""
    reads: dict[str, Handler] = {
        "/api/session": get_session,
        "/api/samples": get_samples,
        "/api/names": history.get_names,
        "/api/history": history.get_history,
        "/api/marks": history.get_marks,
        "/api/workloads": get_workloads,
        "/api/workloads/{id}": get_workload,
        "/api/workloads/{id}/checkpoints": get_checkpoints,
        "/api/commands": get_commands,
        "/api/commands/{id}": get_command,
        "/api/workers/{id}": get_worker,
    }
    return [
        *(web.get(path, refusals_told(handler), allow_head=False) for path, handler in reads.items()),
        web.post("/api/plan", refusals_told(post_plan)),
        web.post("/api/action", refusals_told(post_action)),
    ]
