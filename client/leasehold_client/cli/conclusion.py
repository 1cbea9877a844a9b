"""The end of a verb: waits for the command, prints the outcome and exits with its code."""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from leasehold_client.cli.lookups import (
    gpus_if_known,
    names_if_several,
    preempted_if_known,
    with_short_names,
)
from leasehold_client.cli.selection import name_list
from leasehold_client.cli.verb import CommandOptions
from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.command_watch import has_ended
from leasehold_client.display import standard_output
from leasehold_client.display.documents import echo_document, echo_message, to_dict
from leasehold_client.display.outcome import echo_outcome, failure_lines, member_lines, warning_lines
from leasehold_client.display.plan_view import echo_plan
from leasehold_client.display.progress import follow
from leasehold_client.display.terminal_text import echo_error, one_line
from leasehold_client.errors import (
    CommandWaitTimeoutError,
    LeaseholdError,
    NoCoordinatorError,
    WaitTimeoutError,
)
from leasehold_client.messages import command_state, operation_name, readiness, reason_name

ATTEMPTS: Final = 8
"""Attempts of a command that is rejected as NOT_READY. A remap may wait for several workloads in turn."""

Stop = NoCoordinatorError | KeyboardInterrupt
"""The reason to end the wait for several commands early: an outage, or Ctrl-C."""

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
        try:
            for attempt in _attempts(client, command, options, again):
                command = attempt
        except KeyboardInterrupt:
            if has_ended(command.state):  # the wait was for the readiness
                interrupted(f"{operation_name(command)} did not begin, since a workload is not ready")
            interrupted(_remainder([command]))
        except LeaseholdError as error:
            if options.is_document and has_ended(command.state):  # the wait was for the readiness
                echo_message(command, options.output)
            if isinstance(error, NoCoordinatorError) and (left := _remainder([command])):
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


def _attempts(
    client: Client, command: Command, options: CommandOptions, again: Callable[[], Command] | None
) -> Iterator[Command]:
    """Waits for a command, and creates it again while a workload was not ready. Yields each at its end.

    A command that is created here is yielded before the wait, too.
    """
    began = time.monotonic()
    command = _wait(client, command, options.wait_s, options)
    yield command
    for _ in range(ATTEMPTS):
        if again is None or command.error.reason != ERROR_REASON_NOT_READY:
            break
        limit_s = command.timeout.ToNanoseconds() / 1e9 if options.wait_s is None else options.wait_s
        _wait_ready(client, command, limit_s - (time.monotonic() - began), options)
        left_s = None if options.wait_s is None else max(0.0, limit_s - (time.monotonic() - began))
        command = again()
        yield command
        command = _wait(client, command, left_s, options)
        yield command


def conclude_ready(client: Client, workload: Workload, options: CommandOptions, limit_s: float) -> None:
    """Waits until a started workload is ready, and prints its readiness."""
    try:
        ready = client.wait_workload(workload.workload_id, timeout_s=max(0.0, limit_s))
    except KeyboardInterrupt:
        interrupted(f"{workload.name} continues: `leasehold get workloads` shows its state")
    if options.is_told:
        standard_output.echo(f"{workload.name}: {readiness(ready)}")


def _wait_ready(client: Client, command: Command, limit_s: float, options: CommandOptions) -> None:
    """Waits for the readiness of the workload for which a command was rejected."""
    workload_id = command.error.metadata.get("workload_id") or command.workload_id
    name = client.workload(workload_id).name
    if not options.quiet:
        echo_error(
            f"leasehold: workload {name} is not ready: waiting",
            f"  {one_line(command.error.message)}",
        )
    client.wait_workload(workload_id, timeout_s=max(LAST_LOOK_S, limit_s))


def conclude_all(
    client: Client,
    creations: Sequence[tuple[str, Callable[[], Command]]],
    options: CommandOptions,
    *,
    is_search: bool = False,
    may_retry: bool = False,
) -> None:
    """Creates commands, waits for all of them, and prints each outcome. A failure does not stop the others.

    Exits with 1 if any command is refused or fails, else with 4 if the wait for any command timed out. Ctrl-C
    and an outage end it: the outcomes so far are printed, and the open commands are named.

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
            error.message = _about(label, error.message)
            if len(creations) == 1 and not is_search:
                raise
            errors.append(error)
    commands = [(label, command) for label, command, _ in created]
    failures: dict[str, LeaseholdError] = {}
    if options.wait and stop is None:
        commands, stop = _wait_for_all(client, created, options, failures)
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
            _echo_failure([with_short_names(client, line) if has_answer else line for line in lines])
        elif not options.wait and not options.is_document:
            _echo_stored(command, label, options)
    for refusal in errors:
        message = with_short_names(client, refusal.message) if has_answer else refusal.message
        echo_error(error_line(message, refusal.reason))
    _leave(stop, commands, unasked)
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


def _about(label: str, message: str) -> str:
    """A message that names its target."""
    is_named = re.search(rf"(?<![\w.-]){re.escape(label)}(?![\w-])", message)
    return message if is_named else f"{label}: {message}"


def conclude_plan(client: Client, plan: Plan, workload: str, verb: str, options: CommandOptions) -> None:
    """Prints a plan, and exits with 1 if the plan has a refusal."""
    conclude_plans(client, [(workload, lambda: plan)], verb, options)


def conclude_plans(
    client: Client,
    plans: Sequence[tuple[str, Callable[[], Plan]]],
    verb: str,
    options: CommandOptions,
    *,
    is_search: bool = False,
) -> None:
    """Prints plans, and exits with 1 if any plan is refused or has a refusal.

    Args:
        client: The client.
        plans: Name of each target, and a function that makes its plan.
        verb: The planned verb.
        options: Output format. In JSON, a single plan is a document. Several, and those of a search, are
            ``{"plans": […]}``.
        is_search: Whether the targets were searched. There may be none.
    """
    gpus = gpus_if_known(client)
    places = gpu_places(gpus)
    documents: list[dict[str, object]] = []
    lines: list[str] = []
    for label, make in plans:
        try:
            plan = make()
        except NoCoordinatorError:
            raise
        except LeaseholdError as error:
            if len(plans) == 1 and not is_search:
                raise
            lines.append(error_line(with_places(_about(label, error.message), places), error.reason))
            continue
        if options.is_document:
            documents.append(to_dict(plan))
        else:
            echo_plan(plan, label, verb, gpus, names_if_several(client, plan))
        for refusal in plan.refusals:
            message = with_places(refusal.message, places)
            shown = message if len(plans) == 1 else _about(label, message)
            lines.append(error_line(shown, reason_name(refusal.reason)))
    if options.is_document:
        is_list = is_search or len(plans) > 1
        echo_document({"plans": documents} if is_list else documents[0], options.output)
    for line in lines:
        echo_error(line)
    if lines:
        sys.exit(EXIT_FAILED)


def conclude_cancel(
    client: Client, commands: Sequence[Command], options: CommandOptions, *, is_list: bool
) -> None:
    """Waits for the cancellation of commands, and prints each outcome.

    Exits with 1 if any command ended otherwise, else with 4 if the wait for any command timed out. Ctrl-C as
    for :func:`conclude_all`.

    Args:
        client: The client.
        commands: The commands, whose cancellation is requested.
        options: Wait for all commands together, and output format.
        is_list: Whether several commands were named. In JSON, they are ``{"commands": […]}``.
    """
    failures: dict[str, LeaseholdError] = {}
    stop: Stop | None = None
    ended = [(command.command_id, command) for command in commands]
    if options.wait:
        ended, stop = _wait_for_all(
            client, [(command.command_id, command, None) for command in commands], options, failures
        )
    if options.is_document:
        printed = [to_dict(command) for _, command in ended]
        echo_document({"commands": printed} if is_list else printed[0], options.output)
    is_uncancelled = False
    for _, command in ended:
        what = f"{command.command_id}: {operation_name(command)}"
        if not has_ended(command.state):
            if command.command_id in failures or stop is not None:
                continue
            if options.is_told:
                standard_output.echo(f"{what} is {command_state(command)}, cancellation requested")
        elif command.state == COMMAND_STATE_CANCELLED:
            if options.is_told:
                standard_output.echo(f"{what} is CANCELLED")
                for line in (*member_lines(command), *warning_lines(command)):
                    standard_output.echo(line)
        elif command.state == COMMAND_STATE_SUCCEEDED:
            is_uncancelled = True
            first = f"{command.command_id} was not cancelled: {operation_name(command)} SUCCEEDED"
            _echo_failure([first, *warning_lines(command)])
        else:
            is_uncancelled = True
            first, *others = failure_lines(command)
            _echo_failure([f"{command.command_id} was not cancelled: {first}", *others])
    for failure in failures.values():
        if isinstance(failure, WaitTimeoutError):
            failure.message += "; its cancellation is stored, and waits for its worker"
        echo_error(error_line(with_short_names(client, failure.message), failure.reason))
    _leave(stop, ended)
    if is_uncancelled or not all(isinstance(failure, WaitTimeoutError) for failure in failures.values()):
        sys.exit(EXIT_FAILED)
    if failures:
        sys.exit(EXIT_WAIT_TIMEOUT)


def _fail(lines: list[str]) -> NoReturn:
    _echo_failure(lines)
    sys.exit(EXIT_FAILED)


def _echo_failure(lines: list[str]) -> None:
    first, *others = lines
    echo_error(f"leasehold: {first}", *others)


def _echo_stored(command: Command, what: str, options: CommandOptions) -> None:
    if options.quiet:
        standard_output.echo(command.command_id)
        return
    standard_output.echo(f"{what}: {operation_name(command)} stored as command {command.command_id}")


def _wait_for_all(
    client: Client,
    created: Sequence[tuple[str, Command, Callable[[], Command] | None]],
    options: CommandOptions,
    failures: dict[str, LeaseholdError],
) -> tuple[list[tuple[str, Command]], Stop | None]:
    """The commands at their end, or at the end of the wait, and the outage or Ctrl-C that ended the wait.

    A failed wait is added to ``failures`` by the id of its command: a timeout, or no readiness.
    """
    began = time.monotonic()
    ended: list[tuple[str, Command]] = []
    for number, (label, command, again) in enumerate(created):
        left_s = options.wait_s
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - began), min(left_s, LAST_LOOK_S))
        limited = replace(options, wait_s=left_s, output="table")  # the caller prints all commands together
        latest = command
        try:
            if again is not None or not has_ended(command.state):
                for attempt in _attempts(client, command, limited, again):
                    latest = attempt
        except (NoCoordinatorError, KeyboardInterrupt) as why:
            rest = [(label, latest), *((label, command) for label, command, _ in created[number + 1 :])]
            return [*ended, *(_looked_at(client, rest) if isinstance(why, KeyboardInterrupt) else rest)], why
        except LeaseholdError as error:
            latest = error.command if isinstance(error, CommandWaitTimeoutError) else latest
            error.message = _about(label, error.message)
            failures[latest.command_id] = error
        ended.append((label, latest))
    return ended, None


def _leave(stop: Stop | None, commands: Sequence[tuple[str, Command]], unasked: Sequence[str] = ()) -> None:
    """Names the open commands and exits, if an outage or Ctrl-C ended the wait for them.

    Args:
        stop: What ended the wait. None: it has ended by itself.
        commands: The commands, with the names of their targets.
        unasked: The names of targets without a known command. The request of the first one may have arrived.

    Raises:
        NoCoordinatorError: No coordinator answers.
    """
    parts = (_remainder(command for _, command in commands), _unasked_text(unasked))
    left = "; ".join(part for part in parts if part)
    if isinstance(stop, NoCoordinatorError):
        stop.message += f"; {left}" if left else ""
        raise stop
    if stop is not None:
        interrupted(left)


def _unasked_text(names: Sequence[str]) -> str:
    if not names:
        return ""
    first, *others = names
    more = f", and nothing was requested for {name_list(others)}" if others else ""
    return f"the request for {first} may have arrived{more}"


def _looked_at(client: Client, commands: Sequence[tuple[str, Command]]) -> Iterator[tuple[str, Command]]:
    """The present state of commands, or their last known one if the coordinator does not answer."""
    is_answered = True
    for label, command in commands:
        latest = command
        if is_answered and not has_ended(command.state):
            try:
                latest = client.command(command.command_id)
            except LeaseholdError:
                is_answered = False
        yield label, latest


def _remainder(commands: Iterable[Command]) -> str:
    """The open commands after an interrupted wait, as text. Empty: none."""
    ids = [command.command_id for command in commands if not has_ended(command.state)]
    if not ids:
        return ""
    one = len(ids) == 1
    return (
        f"{'command' if one else 'commands'} {', '.join(ids)} {'continues' if one else 'continue'}: "
        f"`leasehold get commands {' '.join(ids)}` shows {'its state' if one else 'their states'}"
    )


def _wait(client: Client, command: Command, wait_s: float | None, options: CommandOptions) -> Command:
    """Waits for a command. As a document, the command is printed after a timeout too."""
    try:
        return follow(client, command, wait_s)
    except CommandWaitTimeoutError as error:
        if options.is_document:
            echo_message(error.command, options.output)
        raise
