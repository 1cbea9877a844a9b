"""Workloads, commands, events, GPUs and their history as one caller sees them. Pure."""

from hashlib import blake2b
from typing import Final, final

from leasehold.v1 import event_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.event_pb2 import Event
from leasehold.v1.lease_pb2 import LeaseSpan
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.permitted_fields import (
    ACTORS_COMMAND,
    COMMAND,
    EVENT,
    GPU,
    LEASE_SPAN,
    SHARED_COMMAND,
    WORKLOAD,
    restricted,
)
from leasehold_coordinator.core.workload_states import RUNNING

_PUBLIC_EVENTS: Final = (
    event_pb2.EVENT_KIND_WORKER_CONNECTED,
    event_pb2.EVENT_KIND_WORKER_STALE,
    event_pb2.EVENT_KIND_WORKER_LOST,
    event_pb2.EVENT_KIND_WORKER_LEFT,
    event_pb2.EVENT_KIND_WORKER_DELETED,
    event_pb2.EVENT_KIND_GPU_HEALTH,
    event_pb2.EVENT_KIND_CORDON,
)
"""Events without a workload whose messages everybody reads."""

_FOR_OWNER: Final = "the owner of the workload and operators can read the details"

_FOR_OPERATORS: Final = "the command concerns workloads of several owners: an operator can read the details"


def acting(command: Command) -> str:
    """The identity for which a command was requested."""
    return command.on_behalf_of or command.actor


@final
class OwnerViews:
    """The view of one caller. Views of an operator are the messages themselves, which nobody may change.

    Args:
        owner: The identity whose workloads are the caller's own. None: the caller sees everything.
    """

    def __init__(self, owner: str | None) -> None:
        self.owner = owner

    @property
    def scope(self) -> str:
        """Distinguishes the tokens of watches with different views. Empty: the caller sees everything."""
        return "" if self.owner is None else blake2b(self.owner.encode(), digest_size=8).hexdigest()

    @property
    def are_whole(self) -> bool:
        """Whether the caller sees everything."""
        return self.owner is None

    def workload(self, workload: Workload) -> Workload:
        """A workload. The reason of an error belongs to the state of a running one."""
        if self.owner in (None, workload.owner):
            return workload
        view, status = restricted(workload, WORKLOAD), workload.status
        if status.state == RUNNING and status.HasField("error"):
            view.status.error.reason = status.error.reason
            view.status.error.message = _FOR_OWNER
        return view

    def command(self, command: Command) -> Command:
        """A command. Its owners are those of its workloads, or else its actor."""
        if self.owner is None:
            return command
        owners = command.owners or [acting(command)]
        if all(owner == self.owner for owner in owners):
            return command
        is_actor = acting(command) == self.owner
        if not is_actor and self.owner not in owners:
            return restricted(command, COMMAND)
        view = restricted(command, ACTORS_COMMAND if is_actor else SHARED_COMMAND)
        if view.HasField("error"):
            view.error.message = _FOR_OPERATORS
        return view

    def event(self, event: Event) -> Event:
        """An event."""
        if self.owner is None:
            return event
        if event.owner == self.owner and event.kind != event_pb2.EVENT_KIND_GPU_FOREIGN:
            return event  # messages about foreign processes have their command lines
        is_public = event.kind in _PUBLIC_EVENTS and not event.workload_id
        return event if is_public else restricted(event, EVENT)

    def lease_span(self, span: LeaseSpan) -> LeaseSpan:
        """A use of a GPU."""
        if self.owner in (None, span.owner):
            return span
        return restricted(span, LEASE_SPAN)

    def gpu(self, gpu: FleetGpu) -> FleetGpu:
        """A GPU."""
        if self.owner is None:
            return gpu
        return restricted(gpu, GPU)
