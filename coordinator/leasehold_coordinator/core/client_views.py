"""Workloads and commands as clients read them: without values of variables, which may be secrets. Pure."""

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec

from leasehold_coordinator.core.workload_states import is_ended


def workload_view(workload: Workload, *, in_contact: bool, seen: Timestamp | None) -> Workload:
    """A workload as clients read it.

    Args:
        workload: The workload.
        in_contact: Its worker is in contact. Otherwise the status is as of the last word of the worker.
        seen: When the worker was last heard of. None: not since the coordinator started.
    """
    view = Workload()
    view.CopyFrom(workload)
    _hide_values(view.spec)
    if not in_contact and not is_ended(workload.status.state):
        view.out_of_contact = True
        if seen is not None:
            view.report_time.CopyFrom(seen)
    return view


def command_view(command: Command) -> Command:
    """A command as clients read it."""
    if not command.operation.run.spec.environment:
        return command
    view = Command()
    view.CopyFrom(command)
    _hide_values(view.operation.run.spec)
    return view


def _hide_values(spec: WorkloadSpec) -> None:
    for name in spec.environment:
        spec.environment[name] = ""
