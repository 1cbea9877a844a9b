"""The effects of a worker's reports on the known workloads."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.hello_rules import WORKLOAD_LIMIT, check_workload
from leasehold_coordinator.core.operation_rules import creates_workload
from leasehold_coordinator.core.workload_reports import failed, is_revived, registered, reported_again
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.frame_rules import check_workload_of
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.timestamps import now_timestamp

logger = logging.getLogger(__name__)

GONE: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERRUPTED,
    "the worker no longer knows the workload: it ended out of contact before many others, or was lost in a "
    "restart; look for its results, and for its processes on the host, before you run it again",
    concluded_by="coordinator",
)
"""The error of a workload that a worker's hello lacks. The end is only presumed: see :func:`is_presumed`."""


REVIVED_LIMIT_BYTES: Final = 16 * 2**20
"""Most bytes of the records that the reports of one frame make live again."""


async def find_ended(reader: FleetReader, reports: Sequence[Workload]) -> dict[str, Workload | None]:
    """The records of reported workloads that have ended, by id. None: it was deleted.

    A hello may name thousands of large records. So only a record that its report makes live again is whole,
    up to :data:`REVIVED_LIMIT_BYTES`. Of the others, id and worker are known.

    Raises:
        FleetError: PROTOCOL_VIOLATION, a report is invalid. STORAGE_UNAVAILABLE.
    """
    for reported in reports:
        check_workload(reported)
    unknown = {one.workload_id: one for one in reports if one.workload_id not in reader.workloads}
    if not unknown:
        return {}
    left_bytes = REVIVED_LIMIT_BYTES

    def keep(record: Workload) -> Workload:
        nonlocal left_bytes
        if is_revived(record, unknown[record.workload_id]):
            left_bytes -= record.ByteSize()
            if left_bytes >= 0:
                return record
            logger.warning("workload %s stays ended until its next report: too many live again", record.name)
        return Workload(workload_id=record.workload_id, worker_id=record.worker_id)

    ids = list(unknown)
    deleted = dict.fromkeys(await reader.store.find_deletions(ids))
    return deleted | {one.workload_id: one for one in await reader.store.find_workloads(ids, keep)}


def news(
    reader: FleetReader,
    reports: Sequence[Workload],
    over: Mapping[str, Workload | None],
    session: Session,
    *,
    is_complete: bool = False,
) -> list[Workload]:
    """The new records of workloads that a worker's reports change. The caller saves them.

    Args:
        reader: What is known.
        reports: The workloads.
        over: The result of :func:`find_ended`.
        session: The session that they came on.
        is_complete: Whether the worker has no others: those that it lacks have failed.

    Raises:
        FleetError: PROTOCOL_VIOLATION, a workload is on another worker, or the worker has too many unfinished
            workloads. TOO_MANY_CALLS, too many are unknown.
    """
    worker_id, now = session.hello.worker_id, now_timestamp()
    changed: list[Workload] = []
    unknown: list[Workload] = []
    for reported in reports:
        known = reader.workloads.get(reported.workload_id)
        owner = known or over.get(reported.workload_id)
        if owner is not None:
            check_workload_of(owner, worker_id)
        if known is not None:
            is_older = reported.status.generation < known.status.generation
            if is_older and is_complete:  # the worker alone knows its workloads
                logger.warning(
                    "worker %s has an older generation of workload %s: an old journal, or a wrong clock",
                    worker_id,
                    known.name,
                )
            if reported.status.generation > known.status.generation or (is_older and is_complete):
                changed.append(reported_again(known, reported))
        elif owner is None and _is_name_elsewhere(reader, reported.workload_id, worker_id):
            # Requests find ids before names: a request for the other workload would reach this one.
            logger.warning(
                "worker %s reported the id %s, which is the name of another worker's workload",
                worker_id,
                reported.workload_id,
            )
        elif owner is None and reported.workload_id in over and is_ended(reported.status.state):
            continue  # a client deleted it
        elif owner is None:
            unknown.append(registered(reported, session.hello, now))
        elif is_revived(owner, reported):
            logger.warning("workload %s had not ended: its worker reported it again", owner.workload_id)
            changed.append(reported_again(owner, reported))
    new = sum(not is_ended(one.status.state) for one in unknown)
    if (
        new
        and (count := len(reader.workloads.of_worker(worker_id)) + new) > WORKLOAD_LIMIT
        and not is_complete
    ):
        raise FleetError(
            errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
            f"{count} workloads that have not ended are too many for one worker: the limit is "
            f"{WORKLOAD_LIMIT}",
            field="workload",
        )
    if unknown:
        changed += reader.report_bounds.admit(worker_id, unknown)
    if is_complete:
        reported_ids = {one.workload_id for one in reports}
        changed += [
            failed(workload, GONE.to_proto(), now)
            for workload in reader.workloads.of_worker(worker_id)
            if workload.workload_id not in reported_ids and not _is_being_started(reader, workload)
        ]
    return changed


def _is_name_elsewhere(reader: FleetReader, name: str, worker_id: str) -> bool:
    return any(one.worker_id != worker_id for one in reader.workloads.named(name))


def _is_being_started(reader: FleetReader, workload: Workload) -> bool:
    return any(
        creates_workload(stored.command.operation)
        for stored in reader.ledger.of_workload(workload.workload_id)
    )
