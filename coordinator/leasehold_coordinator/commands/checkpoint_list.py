"""Lists the checkpoints on the disks of workers. The coordinator stores none, so it asks all workers."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import ListCheckpointsRequest, ListCheckpointsResponse
from leasehold.worker.v1.session_pb2 import CheckpointQuery

from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.checkpoint_listings import Listed
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet_reader import NAMED_LIMIT, FleetReader
from leasehold_coordinator.fleet.permissions import disguised, is_operator, is_own, require_own
from leasehold_coordinator.lists import list_fields
from leasehold_coordinator.lists.filters import matches
from leasehold_coordinator.lists.pages import page_within

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""How long a worker may take to list its checkpoints."""

LIST_LIMIT: Final = 10_000
"""Most checkpoints of an answer, and of one worker."""

LIST_LIMIT_BYTES: Final = 3_500_000
"""Most bytes of an answer, and of one worker's checkpoints. By default, clients of gRPC accept 4 MiB."""


async def list_checkpoints(fleet: FleetReader, request: ListCheckpointsRequest) -> ListCheckpointsResponse:
    """The newest checkpoints of the workers that are in contact, of users their own.

    Args:
        fleet: The fleet.
        request: Which checkpoints. The workload may have ended.

    Raises:
        FleetError: UNKNOWN_WORKER, UNKNOWN_WORKLOAD, NOT_PERMITTED for another owner's workload, or
            INVALID_ARGUMENT for the filter.
    """
    worker = fleet.registry.find(request.worker) if request.worker else None
    workload_id = ""
    if request.workload:
        workload = await fleet.find_workload(request.workload)
        require_own([workload])
        workload_id = workload.workload_id
    wanted = await read_filter(fleet, request.filter, list_fields.CHECKPOINTS)
    listed = await _list(fleet, worker, workload_id)
    response = ListCheckpointsResponse(unreachable=listed.unreachable)
    found = [one for one in listed.checkpoints if is_own(one.owner) and matches(wanted, one)]
    response.checkpoints.extend(page_within(found, LIST_LIMIT, LIST_LIMIT_BYTES - response.ByteSize()))
    response.truncated = listed.truncated or len(response.checkpoints) < len(found)
    return response


async def find_holders(fleet: FleetReader, checkpoint_id: str) -> set[str]:
    """Ids of the workers in contact that have a checkpoint. Workers that share a directory are several.

    Raises:
        FleetError: UNKNOWN_CHECKPOINT, no worker has the checkpoint, or it belongs to another owner.
    """
    listed = await _list(fleet)
    return _holders(fleet, listed, checkpoint_id)


async def require_own_checkpoints(fleet: FleetReader, worker: str, checkpoint_ids: Iterable[str]) -> None:
    """Refuses checkpoints of others. Asks the worker, if the caller is a user.

    Args:
        fleet: The fleet.
        worker: Id or name of the worker. Empty: all workers.
        checkpoint_ids: Ids of the checkpoints. Empty ids are ignored.

    Raises:
        FleetError: UNKNOWN_CHECKPOINT, or UNKNOWN_WORKER.
    """
    wanted = [checkpoint_id for checkpoint_id in checkpoint_ids if checkpoint_id]
    if not wanted or is_operator():
        return
    listed = await _list(fleet, fleet.registry.find(worker) if worker else None)
    for checkpoint_id in wanted:
        _holders(fleet, listed, checkpoint_id)


def _holders(fleet: FleetReader, listed: Listed, checkpoint_id: str) -> set[str]:
    """Ids of the workers that have a checkpoint of the caller."""
    found = [one for one in listed.checkpoints if one.checkpoint_id == checkpoint_id]
    holders = {one.worker_id for one in found}
    others = [one.owner for one in found if not is_own(one.owner)]
    if not holders or others:
        silent = [_name(fleet, worker_id) for worker_id in listed.unreachable]
        more = f" and {len(silent) - NAMED_LIMIT} more" if len(silent) > NAMED_LIMIT else ""
        unasked = f" ({', '.join(silent[:NAMED_LIMIT])}{more} could not be asked)" if silent else ""
        unknown = FleetError(
            errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
            f"no worker in contact has the checkpoint {checkpoint_id!r}{unasked}: "
            "`leasehold get checkpoints` lists them",
            field="checkpoint_id",
        )
        if others:
            raise disguised(unknown, f"checkpoint {checkpoint_id} belongs to {others[0] or 'nobody'}")
        raise unknown
    return holders


async def _list(fleet: FleetReader, worker: KnownWorker | None = None, workload_id: str = "") -> Listed:
    """The checkpoints of a worker or of all, and of a workload or of all."""
    if worker is not None:
        return await _ask_all(fleet, workload_id, [worker])
    listings = fleet.checkpoint_listings
    list_now = listings.of_workload if workload_id else listings.whole
    return await list_now(partial(_ask_all, fleet, workload_id))


async def _ask_all(fleet: FleetReader, workload_id: str, some: Sequence[KnownWorker] | None = None) -> Listed:
    """Asks workers concurrently. A failed worker does not delay the others.

    Args:
        fleet: The fleet.
        workload_id: The workload. Empty: all.
        some: The workers. None: all.
    """
    workers = fleet.registry.all() if some is None else some
    answers = await asyncio.gather(*(_try(fleet, known, workload_id) for known in workers))
    found = [one for answer in answers if answer is not None for one in answer.checkpoints]
    await _set_owners(fleet, found)
    found.sort(key=lambda one: (one.worker_id, one.checkpoint_id))
    found.sort(key=lambda one: (one.create_time.seconds, one.create_time.nanos), reverse=True)
    silent = [known.hello.worker_id for known, answer in zip(workers, answers, strict=True) if answer is None]
    answered = {known.hello.worker_id for known in workers} - set(silent)
    _set_uses(found, fleet.workloads.values(), answered)
    truncated = any(answer.truncated for answer in answers if answer is not None)
    return Listed(tuple(found), tuple(silent), truncated)


async def _set_owners(fleet: FleetReader, checkpoints: list[Checkpoint]) -> None:
    """Sets the owners of checkpoints: those of their workloads, as far as the coordinator knows them.

    The worker's word counts only for a workload that nobody remembers.
    """
    ids = {one.workload_id for one in checkpoints if one.workload_id}
    owners = {one: fleet.workloads[one].owner for one in ids if one in fleet.workloads}
    others = [one for one in ids if one not in owners]
    for workload in await fleet.store.find_workloads(others, _with_owner):
        owners[workload.workload_id] = workload.owner
    for one in checkpoints:
        one.owner = owners.get(one.workload_id, one.owner)


def _set_uses(checkpoints: list[Checkpoint], workloads: Iterable[Workload], answered: Set[str]) -> None:
    """Sets whether each checkpoint is in use, in the same way for each worker that lists it.

    A worker knows only the needs of its own workloads. So the answer of the worker that wrote the checkpoint
    counts, and any other worker that needs it. For workers without an answer, the stored workloads count. A
    checkpoint that names no worker counts as unneeded unless one of these needs it.

    Args:
        checkpoints: The checkpoints of the workers that answered.
        workloads: The open workloads of the fleet.
        answered: Ids of the workers that answered.
    """
    needed = {one.checkpoint_id for one in checkpoints if one.in_use and not one.in_use_unknown}
    needed |= {one.status.checkpoint_id for one in workloads if one.worker_id not in answered}
    certain = {one.checkpoint_id for one in checkpoints if one.owner_worker_id in ("", one.worker_id)}
    known = needed | certain
    for one in checkpoints:
        one.in_use_unknown = one.checkpoint_id not in known
        one.in_use = one.checkpoint_id in needed or one.in_use_unknown


def _with_owner(record: Workload) -> Workload:
    """The id and the owner of a workload. Workers choose of how many workloads these are asked."""
    return Workload(workload_id=record.workload_id, owner=record.owner)


async def _try(fleet: FleetReader, known: KnownWorker, workload_id: str) -> Listed | None:
    try:
        return await _ask(fleet, known.hello.worker_id, workload_id)
    except FleetError as error:
        logger.warning("checkpoints of worker %s are unknown: %s", known.hello.name, error.message)
        return None


async def _ask(fleet: FleetReader, worker_id: str, workload_id: str) -> Listed:
    """The newest checkpoints of a worker, read page by page, each once.

    Pages may repeat a checkpoint, since a worker may restart between two pages.

    Raises:
        FleetError: WORKER_UNAVAILABLE, or what the worker answers.
    """
    session = fleet.contact(worker_id)
    deadline = time.monotonic() + ANSWER_S
    found: dict[str, Checkpoint] = {}
    found_bytes = 0
    last = ""
    while True:
        query = CheckpointQuery(workload_id=workload_id, after_checkpoint_id=last)
        answer = await session.list_checkpoints(query, max(0.0, deadline - time.monotonic()))
        if answer.HasField("error"):
            raise FleetError.from_proto(answer.error)
        for checkpoint in answer.checkpoints:
            checkpoint.worker_id = worker_id
            found[checkpoint.checkpoint_id] = checkpoint
            last = checkpoint.checkpoint_id
            found_bytes += checkpoint.ByteSize()
        more = answer.more and bool(answer.checkpoints)
        is_full = len(found) >= LIST_LIMIT or found_bytes >= LIST_LIMIT_BYTES
        if is_full or not more:
            return Listed(tuple(found.values()), truncated=more)


def _name(fleet: FleetReader, worker_id: str) -> str:
    known = fleet.registry.get(worker_id)
    return known.hello.name if known is not None else worker_id
