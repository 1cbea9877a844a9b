"""The end of a verb: waits for the command, prints the outcome and exits with its code."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.arguments.cordon_targets import CordonTarget
from leasehold_client.arguments.gpu_names import gpu_places, with_places
from leasehold_client.cli.command_waits import Stop, about, attempts, leave, remainder, wait_for_all
from leasehold_client.cli.exit_codes import (
    EXIT_FAILED,
    EXIT_USAGE,
    EXIT_WAIT_TIMEOUT,
    echo_failure,
    error_line,
    interrupted,
    is_usage,
)
from leasehold_client.cli.lookups import gpus_if_known, preempted_if_known, with_short_names
from leasehold_client.cli.verb import CommandOptions
from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.command_watch import has_ended
from leasehold_client.display import standard_output
from leasehold_client.display.documents import echo_document, echo_message, to_dict
from leasehold_client.display.outcome import echo_outcome, failure_lines
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, WaitTimeoutError
from leasehold_client.messages import operation_name, readiness


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
        try:
            for attempt in attempts(client, command, options, again):
                command = attempt
        except KeyboardInterrupt:
            if has_ended(command.state):  # the wait was for the readiness
                interrupted(f"{operation_name(command)} did not begin, since a workload is not ready")
            interrupted(remainder([command]))
        except LeaseholdError as error:
            if options.is_document and has_ended(command.state):  # the wait was for the readiness
                echo_message(command, options.output)
            if isinstance(error, NoCoordinatorError) and (left := remainder([command])):
                error.message += f"; {left}"
            raise
    succeeded = command.state == COMMAND_STATE_SUCCEEDED
    if options.is_document:
        echo_message(command, options.output)
    elif not options.wait:
        _echo_stored(command, workload, options)
    elif succeeded and options.is_told:
        ids = list(command.result.preempted_workload_ids)
        echo_outcome(command, workload, gpus_if_known(client), preempted_if_known(client, ids))
    if options.wait and not succeeded:
        places = gpu_places(gpus_if_known(client))
        _fail([with_places(line, places) for line in failure_lines(command)])


def conclude_ready(client: Client, workload: Workload, options: CommandOptions, limit_s: float) -> None:
    """Waits until a started workload is ready, and prints its readiness."""
    try:
        ready = client.wait_workload(workload.workload_id, timeout_s=max(0.0, limit_s))
    except KeyboardInterrupt:
        interrupted(f"{workload.name} continues: `leasehold get workloads` shows its state")
    if options.is_told:
        standard_output.echo(f"{workload.name}: {readiness(ready)}")


def conclude_all(
    client: Client,
    creations: Sequence[tuple[str, Callable[[], Command]]],
    options: CommandOptions,
    *,
    is_search: bool = False,
    may_retry: bool = False,
) -> None:
    """Creates commands, waits for all of them, and prints each outcome. A failure does not stop the others.

    Exits with 2 if all failures are usage errors, with 4 if in all of them the wait timed out, else with 1 if
    any command is refused or fails. Ctrl-C and an outage end it: the outcomes so far are printed, and the
    open commands are named.

    Args:
        client: The client.
        creations: Name of each target, and a function that creates its command.
        options: Wait for all commands together, and output format. In JSON, a single command is a document.
            Several, and those of a search, are ``{"commands": […]}``.
        is_search: Whether the targets were searched. There may be none.
        may_retry: Whether a command that is rejected as NOT_READY is created again after the readiness.

    Raises:
        NoCoordinatorError: No coordinator answers. Commands that were created continue.
        KeyboardInterrupt: Ctrl-C came before any command was created.
    """
    errors: list[LeaseholdError] = []
    created: list[tuple[str, Command, Callable[[], Command] | None]] = []
    stop: Stop | None = None
    unasked: Sequence[str] = ()
    for number, (label, create) in enumerate(creations):
        try:
            created.append((label, create(), create if may_retry else None))
        except (NoCoordinatorError, KeyboardInterrupt) as why:
            if not created:
                raise
            stop = why
            unasked = [name for name, _ in creations[number:]]
            break
        except LeaseholdError as error:
            error.message = about(label, error.message)
            if len(creations) == 1 and not is_search:
                raise
            errors.append(error)
    commands = [(label, command) for label, command, _ in created]
    failures: dict[str, LeaseholdError] = {}
    if options.wait and stop is None:
        commands, stop = wait_for_all(client, created, options, failures)
    has_answer = not isinstance(stop, NoCoordinatorError)
    errors += failures.values()
    is_list = is_search or len(creations) > 1
    if options.is_document and (commands or is_search):
        printed = [to_dict(command) for _, command in commands]
        echo_document({"commands": printed} if is_list else printed[0], options.output)
    has_failed = False
    gpus = gpus_if_known(client) if commands and options.is_told and options.wait and has_answer else []
    for label, command in commands:
        if command.command_id in failures:
            continue
        if command.state == COMMAND_STATE_SUCCEEDED:
            if options.is_told:
                ids = list(command.result.preempted_workload_ids)
                echo_outcome(command, label, gpus, preempted_if_known(client, ids) if has_answer else ids)
        elif has_ended(command.state):
            has_failed = True
            first, *others = failure_lines(command)
            lines = (f"{label}: {first}", *others)
            echo_failure([with_short_names(client, line) if has_answer else line for line in lines])
        elif not options.wait and not options.is_document:
            _echo_stored(command, label, options)
    for refusal in errors:
        message = with_short_names(client, refusal.message) if has_answer else refusal.message
        echo_error(error_line(message, refusal.reason))
    leave(stop, commands, unasked)
    if errors and not has_failed and all(is_usage(refusal) for refusal in errors):
        sys.exit(EXIT_USAGE)
    if has_failed or not all(isinstance(refusal, WaitTimeoutError) for refusal in errors):
        sys.exit(EXIT_FAILED)
    if errors:
        sys.exit(EXIT_WAIT_TIMEOUT)


def conclude_targets(
    client: Client,
    targets: Sequence[CordonTarget],
    create: Callable[[str, Sequence[str]], Command],
    options: CommandOptions,
    *,
    is_search: bool,
) -> None:
    """As :func:`conclude_all`, with one command per target, created from its worker id and GPU UUIDs."""
    creations = [(target.label, partial(create, target.worker_id, target.gpu_uuids)) for target in targets]
    conclude_all(client, creations, options, is_search=is_search)


def _fail(lines: list[str]) -> NoReturn:
    echo_failure(lines)
    sys.exit(EXIT_FAILED)


def _echo_stored(command: Command, what: str, options: CommandOptions) -> None:
    if options.quiet:
        standard_output.echo(command.command_id)
        return
    standard_output.echo(f"{what}: {operation_name(command)} stored as command {command.command_id}")
