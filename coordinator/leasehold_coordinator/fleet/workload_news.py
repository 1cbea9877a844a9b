"""What the reports of a worker change of the known workloads."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.hello_rules import WORKLOAD_LIMIT, check_workload
from leasehold_coordinator.core.operation_rules import creates_workload
from leasehold_coordinator.core.workload_reports import failed, is_presumed, registered, reported_again
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.timestamps import now_timestamp

logger = logging.getLogger(__name__)

GONE: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERRUPTED,
    "its worker restarted and does not have it any more: look at its host, then run it again",
    concluded_by="coordinator",
)
"""The worker did not say that the workload has ended: see :func:`is_presumed`."""


async def find_ended(reader: FleetReader, reports: Sequence[Workload]) -> dict[str, Workload | None]:
    """Those of the reported workloads that have ended as far as is known, by id. None: it was deleted.

    Raises:
        FleetError: PROTOCOL_VIOLATION, a report breaks a rule; STORAGE_UNAVAILABLE.
    """
    for reported in reports:
        check_workload(reported)
    unknown = [one.workload_id for one in reports if one.workload_id not in reader.workloads]
    if not unknown:
        return {}
    deleted = dict.fromkeys(await reader.store.find_deletions(unknown))
    return deleted | {one.workload_id: one for one in await reader.store.find_workloads(unknown)}


def news(
    reader: FleetReader,
    reports: Sequence[Workload],
    over: Mapping[str, Workload | None],
    session: Session,
    *,
    is_complete: bool = False,
) -> list[Workload]:
    """The workloads that a worker's reports change, as they are to be saved.

    Args:
        reader: What is known.
        reports: The workloads.
        over: What :func:`find_ended` found.
        session: The session that they came on.
        is_complete: Whether the worker has no others: those that it lacks have failed.

    Raises:
        FleetError: PROTOCOL_VIOLATION, they are too many.
    """
    worker_id, now = session.hello.worker_id, now_timestamp()
    changed: list[Workload] = []
    new = 0
    for reported in reports:
        known = reader.workloads.get(reported.workload_id)
        owner = known or over.get(reported.workload_id)
        if owner is not None and owner.worker_id != worker_id:
            logger.warning("worker %s reported %s, which is another's", worker_id, owner.workload_id)
        elif known is not None:
            if reported.status.generation > known.status.generation:
                changed.append(reported_again(known, reported))
        elif owner is None and _is_name_elsewhere(reader, reported.workload_id, worker_id):
            # An id is looked for before a name: requests for the other workload would go to this one.
            logger.warning("worker %s reported the name %s as an id", worker_id, reported.workload_id)
        elif owner is None and reported.workload_id in over and is_ended(reported.status.state):
            continue  # a client deleted it
        elif owner is None:
            changed.append(registered(reported, worker_id, now))
            new += not is_ended(reported.status.state)
        elif is_presumed(owner) and not is_presumed(reported):
            logger.warning("workload %s is back: its worker still has it", owner.workload_id)
            changed.append(reported_again(owner, reported))
    if (
        new
        and (count := len(reader.workloads.of_worker(worker_id)) + new) > WORKLOAD_LIMIT
        and not is_complete
    ):
        raise FleetError(
            errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
            f"{count} workloads that have not ended are too many for one worker: {WORKLOAD_LIMIT} fit",
            field="workload",
        )
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
