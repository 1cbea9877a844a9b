"""``leasehold local``: the worker of this host, without a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec

import click

from leasehold_client import interrupts
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exec import socket_option
from leasehold_client.cli.exit_codes import fail, not_utf8
from leasehold_client.cli.parameter_types import refuse_empty
from leasehold_client.cli.verb import output_option
from leasehold_client.display.standard_output import echo, echo_done
from leasehold_client.errors import LeaseholdError

if TYPE_CHECKING:
    from leasehold.local.v1.local_service_pb2 import ListResponse
    from leasehold.v1.lease_pb2 import GpuLease

    from leasehold_client.local.worker import LocalWorker

Arguments = ParamSpec("Arguments")

NOTHING: Final = "-"


def _local_verb(function: Callable[Concatenate[LocalWorker, Arguments], None]) -> Callable[..., None]:
    """Connects a verb to the worker of this host, and prints any error as one line."""

    @socket_option
    @wraps(function)
    def call(socket: Path | None, *positional: Arguments.args, **named: Arguments.kwargs) -> None:
        from leasehold_client.local.worker import LocalWorker, check_access

        interrupts.raise_in_call()
        refuse_empty(click.get_current_context())
        try:
            check_access(socket)
            with LocalWorker(socket) as worker:
                function(worker, *positional, **named)
        except LeaseholdError as error:
            fail(error)
        except UnicodeEncodeError as error:
            fail(not_utf8(error))

    return call


@click.group()
def local() -> None:
    """Show and release leases of this host's worker, without a coordinator."""


@local.command(epilog=examples("leasehold local leases"))
@output_option
@_local_verb
def leases(worker: LocalWorker, output: str) -> None:
    """List the GPUs of this host with their holders, and the queue of claims."""
    from leasehold.v1.lease_pb2 import SlotState
    from leasehold.v1.workload_pb2 import WorkloadState

    from leasehold_client.display.documents import echo_message
    from leasehold_client.display.fleet_tables import gpu_reason
    from leasehold_client.display.tables import Column, echo_table
    from leasehold_client.messages import enum_name

    found = worker.list()
    if output != "table":
        echo_message(found, output)
        return
    holders = {workload.workload_id: workload for workload in found.workloads}

    def holder(gpu: GpuLease) -> str:
        known = holders.get(gpu.workload_id)
        return known.name if known else gpu.workload_id or NOTHING

    def user(gpu: GpuLease) -> str:
        known = holders.get(gpu.workload_id)
        return known.user if known else NOTHING

    def pid(gpu: GpuLease) -> str:
        known = holders.get(gpu.workload_id)
        return str(known.status.root_pid) if known and known.status.HasField("root_pid") else NOTHING

    def slot_state(gpu: GpuLease) -> str:
        return enum_name(SlotState.Name, gpu.state, "SLOT_STATE_").lower()

    columns: Sequence[Column[GpuLease]] = (
        Column("SLOT", lambda gpu: str(gpu.slot)),
        Column("GPU", lambda gpu: gpu.gpu_uuid, drop=1),
        Column("STATE", slot_state, is_state=True),
        Column("HOLDER", holder, shrinks=True),
        Column("USER", user, drop=3),
        Column("PID", pid, drop=4),
        Column("REASON", lambda gpu: gpu_reason(gpu) or NOTHING, drop=2, shrinks=True),
    )
    echo_table(columns, found.gpus)
    for workload in found.workloads:
        if not workload.status.HasField("lease"):
            state = enum_name(WorkloadState.Name, workload.status.state, "WORKLOAD_STATE_")
            echo(f"{workload.name} of {workload.user} holds no GPU: {state}")
    _echo_queue(found)


@local.command(epilog=examples("leasehold local release taken"))
@click.argument("workload")
@_local_verb
def release(worker: LocalWorker, workload: str) -> None:
    """Release a claim or an adopted process, by workload name or id, or by lease id. It keeps running."""
    released = worker.release(workload)
    echo_done(f"{released.name}: released")


def _echo_queue(found: ListResponse) -> None:
    if found.HasField("cordon"):
        from leasehold_client.display.fleet_tables import cordon_text

        echo(f"the worker is {cordon_text(found.cordon)}")
    for place, claim in enumerate(found.waiting, 1):
        gpus = f"{claim.gpu_count} GPU{'' if claim.gpu_count == 1 else 's'}"
        kind = ", preemptible" if claim.helper else f", priority {claim.priority}" if claim.priority else ""
        echo(f"{place} in the queue: {claim.name} of {claim.user} (pid {claim.pid}) for {gpus}{kind}")
