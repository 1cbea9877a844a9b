"""The two lines above the list: the connection, and counts of the fleet. Pure."""

from collections import Counter

from leasehold.v1 import lease_pb2

from leasehold_client.display.terminal_text import one_line
from leasehold_client.messages import PARKED, enum_name, span_text
from leasehold_client.top.contact import Contact
from leasehold_client.top.fleet_model import FleetModel
from leasehold_client.top.row_text import parked_text
from leasehold_client.top.rows import is_reached, waiting_claims


def connection_text(contact: Contact, model: FleetModel, *, is_paused: bool) -> tuple[str, str]:
    """The state of the connection, and its class of ``top.tcss``.

    Args:
        contact: The connection.
        model: The fleet.
        is_paused: Whether the list stands still.
    """
    if contact.lost_since is not None:
        away = span_text(contact.clock() - contact.lost_since)
        problem = one_line(contact.problem)
        return f"COORDINATOR AWAY for {away} (this is the last known state; trying again): {problem}", "away"
    if contact.refusal:
        return f"REFUSED: {contact.refusal}", "away"
    if not model.is_complete:
        return "catching up: reading the whole fleet", "waiting"
    if is_paused:
        return "PAUSED: press p to go on", "waiting"
    return "live", "live"


def counts_text(model: FleetModel) -> str:
    """Counts of hosts, GPUs by state, parked workloads, waiting claims and open commands.

    GPUs of hosts out of contact have no state here, since the coordinator places nothing on them, and their
    claims are not counted. A GPU of an unknown host has no state, and is not out of contact either.
    """
    workers = model.workers.values.values()
    reached = {one.worker_id for one in workers if is_reached(one)}
    away = {one.worker_id for one in workers} - reached
    gpus = model.gpus.values.values()
    states = Counter(one.lease.state for one in gpus if one.worker_id in reached)
    names = [
        f"{count} {enum_name(lease_pb2.SlotState.Name, state, 'SLOT_STATE_').lower()}"
        for state, count in sorted(states.items(), key=lambda item: -item[1])
    ]
    if lost := sum(one.worker_id in away for one in gpus):
        names.append(f"{lost} out of contact")
    parked = [one for one in model.workloads.values.values() if one.status.state in PARKED]
    waiting = sum(map(waiting_claims, workers))
    parts = [
        f"{_counted(len(workers), 'host')}{f', {len(away)} out of contact' if away else ''}",
        f"{_counted(len(gpus), 'GPU')}{': ' if names else ''}{', '.join(names)}",
    ]
    if parked:
        parts.append(parked_text(parked))
    if waiting:
        parts.append(f"{waiting} waiting")
    if model.commands.values:
        parts.append(_counted(len(model.commands.values), "command"))
    return " | ".join(parts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
