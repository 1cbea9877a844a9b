"""How a verb ends: it waits for its command, prints what came of it, and exits with the code that says so."""

import sys

import click
from leasehold.v1.command_pb2 import COMMAND_STATE_CANCELLED, COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.fleet_pb2 import FleetGpu
from leasehold.v1.plan_pb2 import Plan

from leasehold_client import render, standard_output
from leasehold_client.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, StillOpenError
from leasehold_client.exit_codes import EXIT_FAILED, error_line, interrupted
from leasehold_client.plans_view import echo_plan
from leasehold_client.progress import follow
from leasehold_client.watching import Patience, Waiting, has_ended


def conclude(client: Client, command: Command, workload: str, *, waiting: Waiting, output: str) -> None:
    """Waits for a command, prints what it did, and exits with 1 unless it succeeded."""
    no_wait = not waiting.wanted
    if waiting.wanted:
        command = _wait(client, command, waiting, output)
    succeeded = command.state == COMMAND_STATE_SUCCEEDED
    if output == "json":
        render.echo_json(render.to_dict(command))
    elif no_wait:
        standard_output.echo(
            f"{workload}: {render.operation_name(command)} stored as command {command.command_id}"
        )
    elif succeeded:
        render.echo_outcome(command, workload, _gpus_if_known(client))
    if not no_wait and not succeeded:
        _fail(render.failure_lines(command))


def conclude_plan(client: Client, plan: Plan, workload: str, verb: str, *, output: str) -> None:
    """Prints a plan, and exits with 1 if anything refuses it."""
    if output == "json":
        render.echo_json(render.to_dict(plan))
    else:
        echo_plan(plan, workload, verb, _gpus_if_known(client), _names_if_several(client, plan))
    for refusal in plan.refusals:
        click.echo(error_line(refusal.message, render.reason_name(refusal.reason)), err=True)
    if plan.refusals:
        sys.exit(EXIT_FAILED)


def conclude_cancel(client: Client, command: Command, *, waiting: Waiting, output: str) -> None:
    """Waits for a command that is to be cancelled, and exits with 1 if it ended otherwise."""
    if waiting.wanted and not has_ended(command.state):
        command = _wait(client, command, waiting, output)
    if output == "json":
        render.echo_json(render.to_dict(command))
    what = f"{command.command_id}: {render.operation_name(command)}"
    if not has_ended(command.state):
        if output != "json":
            standard_output.echo(f"{what} is {render.command_state(command)}, and is to be cancelled")
    elif command.state == COMMAND_STATE_CANCELLED:
        if output != "json":
            standard_output.echo("\n".join([f"{what} is CANCELLED", *render.member_lines(command)]))
    elif command.state == COMMAND_STATE_SUCCEEDED:
        _fail([f"it is too late to cancel {what} SUCCEEDED"])
    else:
        first, *others = render.failure_lines(command)
        _fail([f"it is too late to cancel {command.command_id}: {first}", *others])


def _fail(lines: list[str]) -> None:
    first, *others = lines
    click.echo("\n".join([f"leasehold: {first}", *others]), err=True)
    sys.exit(EXIT_FAILED)


def _wait(client: Client, command: Command, waiting: Waiting, output: str) -> Command:
    goes_on = f"command {command.command_id} goes on: `leasehold get commands {command.command_id}` shows it"
    try:
        return follow(client, command, Patience(command, waiting.limit_s))
    except KeyboardInterrupt:
        interrupted(goes_on)
    except StillOpenError as error:
        if output == "json":
            render.echo_json(render.to_dict(error.command))
        raise
    except NoCoordinatorError as error:
        raise NoCoordinatorError(f"{error.message}; {goes_on}") from error


def _gpus_if_known(client: Client) -> list[FleetGpu]:
    """The GPUs, for their short names; none where the coordinator has gone since. What was done is done."""
    try:
        return client.gpus()
    except LeaseholdError:
        return []


def _names_if_several(client: Client, plan: Plan) -> dict[str, str]:
    """The names of workloads by id; none where the plan is about one, or the coordinator has gone since."""
    if len({member.workload_id for member in plan.members}) < 2:
        return {}
    try:
        return {workload.workload_id: workload.name for workload in client.workloads()}
    except LeaseholdError:
        return {}
