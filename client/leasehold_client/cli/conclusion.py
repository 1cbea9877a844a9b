"""The end of a verb: waits for the command, prints the outcome and exits with its code."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

from leasehold.v1.command_pb2 import COMMAND_STATE_CANCELLED, COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.errors_pb2 import ERROR_REASON_NOT_READY
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.arguments.cordon_targets import CordonTarget
from leasehold_client.arguments.gpu_names import gpu_places, with_places
from leasehold_client.cli.exit_codes import EXIT_FAILED, EXIT_WAIT_TIMEOUT, error_line, interrupted
from leasehold_client.cli.lookups import (
    gpus_if_known,
    names_if_several,
    preempted_if_known,
    with_short_names,
)
from leasehold_client.cli.verb import READY_LIMIT_S, CommandOptions
from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.command_watch import has_ended
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
    options: CommandOptions,
    *,
    again: Callable[[], Command] | None = None,
) -> None:
    """Waits for a command, prints its outcome, and exits with 1 unless the command succeeded.

    Args:
        client: The client.
        command: The command.
        workload: Name of the target, for messages.
        options: Wait and output format.
        again: Creates the same command again. Called if the command is rejected as NOT_READY, once the
            workload is ready. The whole wait has the limit of ``options``, or else the command's own timeout.
            None: no second attempt.
    """
    if options.wait:
        command = _wait_with_retries(client, command, options, again)
    succeeded = command.state == COMMAND_STATE_SUCCEEDED
    if options.json:
        echo_message(command)
    elif not options.wait:
        _echo_stored(command, workload)
    elif succeeded:
        echo_outcome(command, workload, gpus_if_known(client), preempted_if_known(client, command))
    if options.wait and not succeeded:
        places = gpu_places(gpus_if_known(client))
        _fail([with_places(line, places) for line in failure_lines(command)])


def _wait_with_retries(
    client: Client, command: Command, options: CommandOptions, again: Callable[[], Command] | None
) -> Command:
    """Waits for a command, and creates it again while a workload was not ready."""
    began = time.monotonic()
    command = _wait(client, command, options.wait_s, json=options.json)
    for _ in range(ATTEMPTS):
        if again is None or command.error.reason != ERROR_REASON_NOT_READY:
            break
        limit_s = command.timeout.ToNanoseconds() / 1e9 if options.wait_s is None else options.wait_s
        _wait_ready(client, command, limit_s - (time.monotonic() - began))
        left_s = None if options.wait_s is None else limit_s - (time.monotonic() - began)
        command = _wait(client, again(), left_s, json=options.json)
    return command


def conclude_ready(client: Client, workload: Workload, options: CommandOptions) -> None:
    """Waits until a started workload is ready, and prints that it is ready."""
    limit_s = READY_LIMIT_S if options.wait_s is None else options.wait_s
    client.wait_workload(workload.workload_id, timeout_s=limit_s)
    if not options.json:
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
    options: CommandOptions,
) -> None:
    """Creates commands, waits for all of them, and prints each outcome. A failure does not stop the others.

    Exits with 1 if any command is refused or fails, else with 4 if the wait for any command timed out.

    Args:
        client: The client.
        creations: Name of each target, and a function that creates its command.
        options: Wait for all commands together, and output format. In JSON, a single command is a document,
            and several are ``{"commands": […]}``.

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
    if options.wait:
        commands = _wait_for_all(client, commands, options, errors)
    if options.json and commands:
        printed = [to_dict(command) for _, command in commands]
        echo_json({"commands": printed} if len(creations) > 1 else printed[0])
    has_failed = False
    for label, command in commands:
        if command.state == COMMAND_STATE_SUCCEEDED:
            if not options.json:
                echo_outcome(command, label, [])
        elif has_ended(command.state):
            has_failed = True
            first, *others = failure_lines(command)
            _echo_failure([with_short_names(client, line) for line in (f"{label}: {first}", *others)])
        elif not options.wait and not options.json:
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
    options: CommandOptions,
) -> None:
    """As :func:`conclude_all`, with one command per target, created from its worker id and GPU UUIDs."""
    creations = [(target.label, partial(create, target.worker_id, target.gpu_uuids)) for target in targets]
    conclude_all(client, creations, options)


def conclude_plan(client: Client, plan: Plan, workload: str, verb: str, options: CommandOptions) -> None:
    """Prints a plan, and exits with 1 if the plan has a refusal."""
    gpus = gpus_if_known(client)
    if options.json:
        echo_message(plan)
    else:
        echo_plan(plan, workload, verb, gpus, names_if_several(client, plan))
    places = gpu_places(gpus)
    for refusal in plan.refusals:
        message = with_places(refusal.message, places)
        echo_error(error_line(message, reason_name(refusal.reason)))
    if plan.refusals:
        sys.exit(EXIT_FAILED)


def conclude_cancel(client: Client, command: Command, options: CommandOptions) -> None:
    """Waits for the cancellation of a command, and exits with 1 if the command ended otherwise."""
    if options.wait and not has_ended(command.state):
        command = _wait(client, command, options.wait_s, json=options.json)
    if options.json:
        echo_message(command)
    what = f"{command.command_id}: {operation_name(command)}"
    if not has_ended(command.state):
        if not options.json:
            standard_output.echo(f"{what} is {command_state(command)}, cancellation requested")
    elif command.state == COMMAND_STATE_CANCELLED:
        if not options.json:
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
    options: CommandOptions,
    errors: list[LeaseholdError],
) -> list[tuple[str, Command]]:
    """The commands at their end, or at the end of the wait. Each timeout is added to ``errors``."""
    began = time.monotonic()
    ended: list[tuple[str, Command]] = []
    for label, command in commands:
        left_s = options.wait_s
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - began), min(left_s, LAST_LOOK_S))
        try:
            ended.append((label, _wait(client, command, left_s)))
        except CommandWaitTimeoutError as error:
            errors.append(error)
            ended.append((label, error.command))
    return ended


def _wait(client: Client, command: Command, wait_s: float | None, *, json: bool = False) -> Command:
    """Waits for a command. In JSON, the command is printed after a timeout too."""
    command_id = command.command_id
    remainder = f"command {command_id} continues: `leasehold get commands {command_id}` shows its state"
    try:
        return follow(client, command, wait_s)
    except KeyboardInterrupt:
        interrupted(remainder)
    except CommandWaitTimeoutError as error:
        if json:
            echo_message(error.command)
        raise
    except NoCoordinatorError as error:
        raise NoCoordinatorError(f"{error.message}; {remainder}") from None
