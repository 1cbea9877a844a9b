"""The end of a verb: waits for the command, prints the outcome and exits with its code."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

from leasehold.v1.command_pb2 import COMMAND_STATE_CANCELLED, COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.errors_pb2 import ERROR_REASON_NOT_READY
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.arguments.cordon_targets import CordonTarget
from leasehold_client.arguments.gpu_names import gpu_places, with_places
from leasehold_client.cli.exit_codes import EXIT_FAILED, EXIT_WAIT_TIMEOUT, error_line, interrupted
from leasehold_client.cli.lookups import gpus_if_known, names_if_several, with_short_names
from leasehold_client.cli.verb import READY_LIMIT_S
from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.command_watch import Waiting, has_ended
from leasehold_client.display import standard_output
from leasehold_client.display.documents import echo_json, echo_message, to_dict
from leasehold_client.display.outcome import echo_outcome, failure_lines, member_lines
from leasehold_client.display.plan_view import echo_plan
from leasehold_client.display.progress import follow
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import CommandWaitTimeoutError, LeaseholdError, NoCoordinatorError
from leasehold_client.messages import command_state, operation_name, reason_name

ATTEMPTS: Final = 8
"""Attempts of a command that is rejected as NOT_READY. A remap may wait for several workloads in turn."""

LAST_LOOK_S: Final = 0.5
"""Shortest wait for a command after other commands have used up the time for all."""


def conclude(
    client: Client,
    command: Command,
    workload: str,
    *,
    waiting: Waiting,
    output: str,
    again: Callable[[], Command] | None = None,
) -> None:
    """Waits for a command, prints its outcome, and exits with 1 unless the command succeeded.

    Args:
        client: The client.
        command: The command.
        workload: Name of the target, for messages.
        waiting: Longest wait.
        output: Output format.
        again: Creates the same command again. Called if the command is rejected as NOT_READY, once the
            workload is ready. The whole wait has the limit of ``waiting``, or else the command's own timeout.
            None: no second attempt.
    """
    no_wait = not waiting.wanted
    if waiting.wanted:
        began = time.monotonic()
        command = _wait(client, command, waiting, output)
        for _ in range(ATTEMPTS if again is not None else 0):
            if command.error.reason != ERROR_REASON_NOT_READY or again is None:
                break
            limit_s = command.timeout.ToNanoseconds() / 1e9 if waiting.limit_s is None else waiting.limit_s
            _wait_ready(client, command, limit_s - (time.monotonic() - began))
            left_s = None if waiting.limit_s is None else limit_s - (time.monotonic() - began)
            command = _wait(client, again(), replace(waiting, limit_s=left_s), output)
    succeeded = command.state == COMMAND_STATE_SUCCEEDED
    if output == "json":
        echo_message(command)
    elif no_wait:
        _echo_stored(command, workload)
    elif succeeded:
        echo_outcome(command, workload, gpus_if_known(client))
    if not no_wait and not succeeded:
        places = gpu_places(gpus_if_known(client))
        _fail([with_places(line, places) for line in failure_lines(command)])


def conclude_ready(client: Client, workload: Workload, *, waiting: Waiting, output: str) -> None:
    """Waits until a started workload is ready, and prints this."""
    limit_s = READY_LIMIT_S if waiting.limit_s is None else waiting.limit_s
    client.wait_workload(workload.workload_id, timeout_s=limit_s)
    if output != "json":
        standard_output.echo(f"{workload.name}: ready")


def _wait_ready(client: Client, command: Command, limit_s: float) -> None:
    """Waits for the readiness of the workload for which a command was rejected."""
    workload_id = command.error.metadata.get("workload_id") or command.workload_id
    name = client.workload(workload_id).name
    echo_error(f"leasehold: workload {name} is not ready: waiting")
    client.wait_workload(workload_id, timeout_s=max(LAST_LOOK_S, limit_s))


def conclude_all(
    client: Client,
    creations: Sequence[tuple[str, Callable[[], Command]]],
    *,
    waiting: Waiting,
    output: str,
) -> None:
    """Creates commands, waits for all of them, and prints each outcome. A failure does not stop the others.

    Exits with 1 if any command is refused or fails, else with 4 if the wait for any command timed out.

    Args:
        client: The client.
        creations: Name of each target, and a function that creates its command.
        waiting: Longest wait for all commands together.
        output: Output format. In JSON, a single command is a document, and several are ``{"commands": […]}``.

    Raises:
        NoCoordinatorError: No coordinator answers. Commands that were created continue.
    """
    errors: list[LeaseholdError] = []
    commands: list[tuple[str, Command]] = []
    for label, create in creations:
        try:
            commands.append((label, create()))
        except NoCoordinatorError:
            raise
        except LeaseholdError as error:
            errors.append(error)
    if waiting.wanted:
        commands = _wait_for_all(client, commands, waiting, errors)
    if output == "json" and commands:
        printed = [to_dict(command) for _, command in commands]
        echo_json({"commands": printed} if len(creations) > 1 else printed[0])
    has_failed = False
    for label, command in commands:
        if command.state == COMMAND_STATE_SUCCEEDED:
            if output != "json":
                echo_outcome(command, label, [])
        elif has_ended(command.state):
            has_failed = True
            first, *others = failure_lines(command)
            _echo_failure([with_short_names(client, line) for line in (f"{label}: {first}", *others)])
        elif not waiting.wanted and output != "json":
            _echo_stored(command, label)
    for refusal in errors:
        echo_error(error_line(with_short_names(client, refusal.message), refusal.reason))
    if has_failed or not all(isinstance(refusal, CommandWaitTimeoutError) for refusal in errors):
        sys.exit(EXIT_FAILED)
    if errors:
        sys.exit(EXIT_WAIT_TIMEOUT)


def conclude_targets(
    client: Client,
    targets: Sequence[CordonTarget],
    create: Callable[[str, Sequence[str]], Command],
    *,
    waiting: Waiting,
    output: str,
) -> None:
    """As :func:`conclude_all`, with one command per target, created from its worker id and GPU UUIDs."""
    creations = [(target.label, partial(create, target.worker_id, target.gpu_uuids)) for target in targets]
    conclude_all(client, creations, waiting=waiting, output=output)


def conclude_plan(client: Client, plan: Plan, workload: str, verb: str, *, output: str) -> None:
    """Prints a plan, and exits with 1 if the plan has a refusal."""
    gpus = gpus_if_known(client)
    if output == "json":
        echo_message(plan)
    else:
        echo_plan(plan, workload, verb, gpus, names_if_several(client, plan))
    places = gpu_places(gpus)
    for refusal in plan.refusals:
        message = with_places(refusal.message, places)
        echo_error(error_line(message, reason_name(refusal.reason)))
    if plan.refusals:
        sys.exit(EXIT_FAILED)


def conclude_cancel(client: Client, command: Command, *, waiting: Waiting, output: str) -> None:
    """Waits for the cancellation of a command, and exits with 1 if the command ended otherwise."""
    if waiting.wanted and not has_ended(command.state):
        command = _wait(client, command, waiting, output)
    if output == "json":
        echo_message(command)
    what = f"{command.command_id}: {operation_name(command)}"
    if not has_ended(command.state):
        if output != "json":
            standard_output.echo(f"{what} is {command_state(command)}, cancellation requested")
    elif command.state == COMMAND_STATE_CANCELLED:
        if output != "json":
            standard_output.echo("\n".join([f"{what} is CANCELLED", *member_lines(command)]))
    elif command.state == COMMAND_STATE_SUCCEEDED:
        _fail([f"too late to cancel {what} SUCCEEDED"])
    else:
        first, *others = failure_lines(command)
        _fail([f"too late to cancel {command.command_id}: {first}", *others])


def _fail(lines: list[str]) -> NoReturn:
    _echo_failure(lines)
    sys.exit(EXIT_FAILED)


def _echo_failure(lines: list[str]) -> None:
    first, *others = lines
    echo_error("\n".join([f"leasehold: {first}", *others]))


def _echo_stored(command: Command, what: str) -> None:
    standard_output.echo(f"{what}: {operation_name(command)} stored as command {command.command_id}")


def _wait_for_all(
    client: Client,
    commands: Sequence[tuple[str, Command]],
    waiting: Waiting,
    errors: list[LeaseholdError],
) -> list[tuple[str, Command]]:
    """The commands at their end, or at the end of the wait. Each timeout is added to ``errors``."""
    began = time.monotonic()
    ended: list[tuple[str, Command]] = []
    for label, command in commands:
        left = waiting
        if waiting.limit_s is not None:
            remaining_s = waiting.limit_s - (time.monotonic() - began)
            left = replace(waiting, limit_s=max(remaining_s, min(waiting.limit_s, LAST_LOOK_S)))
        try:
            ended.append((label, _wait(client, command, left, "table")))
        except CommandWaitTimeoutError as error:
            errors.append(error)
            ended.append((label, error.command))
    return ended


def _wait(client: Client, command: Command, waiting: Waiting, output: str) -> Command:
    command_id = command.command_id
    remainder = f"command {command_id} continues: `leasehold get commands {command_id}` shows its state"
    try:
        return follow(client, command, waiting.limit_s)
    except KeyboardInterrupt:
        interrupted(remainder)
    except CommandWaitTimeoutError as error:
        if output == "json":
            echo_message(error.command)
        raise
    except NoCoordinatorError as error:
        raise NoCoordinatorError(f"{error.message}; {remainder}") from None
