"""The fleet, the workloads and the commands as tables, for browsers without JavaScript."""

import html
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

import grpc
from aiohttp import web
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, errors_pb2, eviction_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.fleet_service_pb2 import ListGpusRequest, ListWorkersRequest
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest

from leasehold_web.documents import enum_name
from leasehold_web.entries import Api, LoginRefusedError
from leasehold_web.guards import SESSION
from leasehold_web.refusals import refusal, status_of
from leasehold_web.view_paths import TABLE_PREFIX
from leasehold_web.workload_names import workload_names

CALL_TIMEOUT_S: Final = 10.0
PAGE_SIZE: Final = 200
WORKERS_LIMIT: Final = 1000
"""Workers of one list. Of others, the tables show the id, and no loss of contact."""

LAST_KNOWN: Final = " (last known)"
"""Behind the state of a GPU or workload whose worker is out of contact, as in the live lists."""

_DIRECTIONS: Final = {
    ord(one): ascii(one)[1:-1]
    for one in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
}
"""Escapes of bidirectional marks, which change the order of displayed text: the same as in dom.js."""

_PARKED: Final = (
    workload_pb2.WORKLOAD_STATE_SLEEPING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
    workload_pb2.WORKLOAD_STATE_STOPPED,
)

_GIB: Final = 2**30

Row = Sequence[str]


async def lead_to_fleet(request: web.Request) -> web.Response:
    """The address without the name of a table."""
    raise web.HTTPSeeOther(f"{TABLE_PREFIX}fleet")


async def get_table(request: web.Request) -> web.Response:
    """A page of one table."""
    session = request[SESSION]
    kind, token = request.match_info["kind"], request.query.get("page_token", "")
    if kind not in _TABLES:
        raise web.HTTPNotFound(text="no table has this name")
    head, read = _TABLES[kind]
    try:
        rows, next_token = await read(await session.entry.api(), token)
    except LoginRefusedError as error:  # the credentials can't be read for now
        return _alert(kind, str(error), 503)
    except grpc.aio.AioRpcError as error:
        return _alert(kind, str(refusal(error)["message"]), status_of(error))
    body = _table(kind, head, rows)
    if next_token:
        body += f'<p><a href="/plain/{kind}?page_token={quote(next_token)}">Next page</a></p>'
    return web.Response(text=_page(kind, body), content_type="text/html")


def _alert(kind: str, message: str, status: int) -> web.Response:
    text = _page(kind, f'<p role="alert">{_text(message)}</p>')
    return web.Response(text=text, content_type="text/html", status=status)


async def _fleet(api: Api, token: str) -> tuple[list[Row], str]:
    page = await api.fleet.ListGpus(
        ListGpusRequest(page_size=PAGE_SIZE, page_token=token), metadata=api.metadata, timeout=CALL_TIMEOUT_S
    )
    silent = await _first_workers(api, "state != CONNECTED")
    silent_ids = {one.worker_id for one in silent}
    rows: list[Row] = [_gpu(gpu, LAST_KNOWN if gpu.worker_id in silent_ids else "") for gpu in page.gpus]
    if not token:
        rows += [
            [worker.name, "", "", enum_name(worker_pb2.WorkerState.DESCRIPTOR, worker.state)]
            for worker in silent
            if worker.worker_id in page.unreachable
        ]
    return rows, page.next_page_token


async def _first_workers(api: Api, wanted: str = "") -> Sequence[Worker]:
    page = await api.fleet.ListWorkers(
        ListWorkersRequest(page_size=WORKERS_LIMIT, filter=wanted),
        metadata=api.metadata,
        timeout=CALL_TIMEOUT_S,
    )
    return page.workers


def _gpu(gpu: FleetGpu, mark: str) -> Row:
    lease, sample = gpu.lease, gpu.lease.sample
    used = f"{sample.memory_used_bytes / _GIB:.1f}" if sample.HasField("memory_used_bytes") else "unknown"
    total = (
        f"{gpu.gpu.memory_total_bytes / _GIB:.0f}" if gpu.gpu.HasField("memory_total_bytes") else "unknown"
    )
    return [
        gpu.worker_name,
        str(gpu.gpu.slot),
        gpu.gpu.name,
        enum_name(lease_pb2.SlotState.DESCRIPTOR, lease.state) + mark,
        gpu.workload_name,
        f"{used} of {total} GiB",
        f"{sample.utilization_percent} %" if sample.HasField("utilization_percent") else "unknown",
        f"{sample.temperature_celsius} °C" if sample.HasField("temperature_celsius") else "unknown",
        lease.health_reason,
    ]


def _workload_state(workload: Workload) -> str:
    status = workload.status
    state = enum_name(workload_pb2.WorkloadState.DESCRIPTOR, status.state)
    if status.state != workload_pb2.WORKLOAD_STATE_RUNNING:
        return f"{state} (yielded)" if status.yielded and status.state in _PARKED else state
    if status.HasField("error"):  # some hooks failed after a restore
        return f"{state} ({enum_name(errors_pb2.ErrorReason.DESCRIPTOR, status.error.reason)})"
    return state if status.HasField("ready_time") else f"{state} (not ready)"


def _parked(status: WorkloadStatus) -> str:
    """The bytes and the place of a parked workload, as in words.js. Empty: not parked."""
    host = status.parked_bytes if status.HasField("parked_bytes") else None
    disk = status.disk_bytes if status.HasField("disk_bytes") else None
    match status.state:
        case workload_pb2.WORKLOAD_STATE_CHECKPOINTED:
            return f"{_size(disk)} on disk"
        case workload_pb2.WORKLOAD_STATE_STOPPED:
            is_without_checkpoint = status.HasField("park_time") and not status.checkpoint_id
            return f"{_size(0 if disk is None and is_without_checkpoint else disk)} on disk"
        case workload_pb2.WORKLOAD_STATE_SLEEPING:
            return _asleep(status, host)
        case workload_pb2.WORKLOAD_STATE_SUSPENDED:
            return f"{_size(host)} in host memory"
    # Members of a WEDGED workload may be suspended.
    return f"{_size(host)} in host memory" if host is not None else ""


def _asleep(status: WorkloadStatus, host: int | None) -> str:
    match status.parked_by.weight_strategy:
        case eviction_pb2.WEIGHT_STRATEGY_OFFLOAD:
            return f"{_size(host)} in host memory"
        case eviction_pb2.WEIGHT_STRATEGY_DISCARD:
            return "weights discarded"
    return f"{_size(None)} in device memory" if status.HasField("parked_by") else _size(None)


def _size(value: int | None) -> str:
    if value is None:
        return "unknown size"
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(value.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{value / 1024**power:.1f} {units[power]}" if power else f"{value} B"


async def _workloads(api: Api, token: str) -> tuple[list[Row], str]:
    page = await api.workloads.ListWorkloads(
        ListWorkloadsRequest(include_ended=True, page_size=PAGE_SIZE, page_token=token),
        metadata=api.metadata,
        timeout=CALL_TIMEOUT_S,
    )
    names = {worker.worker_id: worker.name for worker in await _first_workers(api)} if page.workloads else {}
    rows: list[Row] = [
        [
            one.name,
            _workload_state(one) + (LAST_KNOWN if one.out_of_contact else ""),
            one.owner,
            names.get(one.worker_id, one.worker_id),
            str(len(one.status.lease.gpu_uuids)),
            _parked(one.status),
            _time(one.create_time),
        ]
        for one in page.workloads
    ]
    return rows, page.next_page_token


async def _commands(api: Api, token: str) -> tuple[list[Row], str]:
    page = await api.commands.ListCommands(
        ListCommandsRequest(page_size=PAGE_SIZE, page_token=token),
        metadata=api.metadata,
        timeout=CALL_TIMEOUT_S,
    )
    ids = dict.fromkeys(one for command in page.commands for one in _workloads_of(command))
    names = await workload_names(api, list(ids))
    is_of_host = any(not _workloads_of(command) for command in page.commands)
    workers = {worker.worker_id: worker.name for worker in await _first_workers(api)} if is_of_host else {}
    rows: list[Row] = [
        [
            one.command_id,
            (one.operation.WhichOneof("kind") or "").replace("_", " "),
            enum_name(command_pb2.CommandState.DESCRIPTOR, one.state),
            one.phase,
            _about(one, names, workers),
            f"{one.actor}{f' for {one.on_behalf_of}' if one.on_behalf_of else ''}",
            _time(one.create_time),
            one.error.message,
        ]
        for one in page.commands
    ]
    return rows, page.next_page_token


def _about(command: Command, names: Mapping[str, str], workers: Mapping[str, str]) -> str:
    """The target of a command: its workloads, or its host, with UUIDs unless the whole host is meant."""
    if workloads := _workloads_of(command):
        return ", ".join(names.get(one, one) for one in workloads)
    operation = command.operation
    uuids = operation.cordon.gpu_uuids or operation.uncordon.gpu_uuids or operation.reset_gpu_health.gpu_uuids
    return ", ".join([workers.get(command.worker_id, command.worker_id), *uuids])


def _workloads_of(command: Command) -> list[str]:
    """The ids of the workloads of a command. A remap has all of them in its moves."""
    moved = [move.workload_id for move in command.operation.remap.moves]
    return moved or [command.workload_id] * bool(command.workload_id)


_TABLES: Final = {
    "fleet": (
        ("Host", "Slot", "GPU", "State", "Workload", "Memory", "Utilization", "Temperature", "Health"),
        _fleet,
    ),
    "workloads": (("Workload", "State", "Owner", "Worker", "GPUs", "Parked", "Created"), _workloads),
    "commands": (
        ("Command", "Operation", "State", "Phase", "About", "Actor", "Created", "Error"),
        _commands,
    ),
}


def _table(caption: str, head: Iterable[str], rows: Iterable[Row]) -> str:
    columns = "".join(f'<th scope="col">{_text(one)}</th>' for one in head)
    lines = ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return f"<p>No {_text(caption)}: there is nothing to show.</p>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _page(kind: str, body: str) -> str:
    links = "".join(
        f'<a href="/plain/{one}"{" aria-current=page" if one == kind else ""}>{one.capitalize()}</a>'
        for one in _TABLES
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{kind.capitalize()} · Leasehold</title>"
        '<link rel="icon" href="/static/favicon.svg"><link rel="stylesheet" href="/static/style.css"></head>'
        f'<body class="plain"><header class="bar"><span class="brand">Leasehold</span><nav>{links}</nav>'
        '<form method="post" action="/logout"><button class="quiet">Log out</button></form></header>'
        f"<main><h1>{kind.capitalize()}</h1><p>The table does not change by itself: load the page again. "
        f'With JavaScript, <a href="/">the page</a> is live.</p>{body}</main></body></html>'
    )


def _text(value: str) -> str:
    return html.escape(value[:2_000].translate(_DIRECTIONS))


def _time(moment: Timestamp) -> str:
    return (
        datetime.fromtimestamp(moment.seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if moment.seconds
        else ""
    )


def routes() -> list[web.RouteDef]:
    """The routes of this module."""
    return [
        web.get(TABLE_PREFIX + "{kind}", get_table),
        *(web.get(path, lead_to_fleet) for path in (TABLE_PREFIX.rstrip("/"), TABLE_PREFIX)),
    ]
