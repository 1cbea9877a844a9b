"""The wait for commands: further attempts, the time for all, and what continues after an interrupt."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from leasehold.v1.command_pb2 import Command
from leasehold.v1.errors_pb2 import ERROR_REASON_NOT_READY

from leasehold_client.cli.exit_codes import interrupted
from leasehold_client.cli.selection import name_list
from leasehold_client.cli.verb import CommandOptions
from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.command_watch import has_ended
from leasehold_client.display.documents import echo_message
from leasehold_client.display.progress import follow
from leasehold_client.display.terminal_text import echo_error, one_line
from leasehold_client.errors import CommandWaitTimeoutError, LeaseholdError, NoCoordinatorError

ATTEMPTS: Final = 8
"""Attempts of a command that is rejected as NOT_READY. A remap may wait for several workloads in turn."""

Stop = NoCoordinatorError | KeyboardInterrupt
"""The reason to end the wait for several commands early: an outage, or Ctrl-C."""

LAST_LOOK_S: Final = 0.5
"""Shortest wait for a command after other commands have used up the time for all."""


def attempts(
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


def _wait(client: Client, command: Command, wait_s: float | None, options: CommandOptions) -> Command:
    """Waits for a command. As a document, the command is printed after a timeout too."""
    try:
        return follow(client, command, wait_s)
    except CommandWaitTimeoutError as error:
        if options.is_document:
            echo_message(error.command, options.output)
        raise


def wait_for_all(
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
                for attempt in attempts(client, command, limited, again):
                    latest = attempt
        except (NoCoordinatorError, KeyboardInterrupt) as why:
            rest = [(label, latest), *((label, command) for label, command, _ in created[number + 1 :])]
            return [*ended, *(_looked_at(client, rest) if isinstance(why, KeyboardInterrupt) else rest)], why
        except LeaseholdError as error:
            latest = error.command if isinstance(error, CommandWaitTimeoutError) else latest
            error.message = about(label, error.message)
            failures[latest.command_id] = error
        ended.append((label, latest))
    return ended, None


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


def leave(stop: Stop | None, commands: Sequence[tuple[str, Command]], unasked: Sequence[str] = ()) -> None:
    """Names the open commands and exits, if an outage or Ctrl-C ended the wait for them.

    Args:
        stop: What ended the wait. None: it has ended by itself.
        commands: The commands, with the names of their targets.
        unasked: The names of targets without a known command. The request of the first one may have arrived.

    Raises:
        NoCoordinatorError: No coordinator answers.
    """
    parts = (remainder(command for _, command in commands), _unasked_text(unasked))
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


def remainder(commands: Iterable[Command]) -> str:
    """The open commands after an interrupted wait, as text. Empty: none."""
    ids = [command.command_id for command in commands if not has_ended(command.state)]
    if not ids:
        return ""
    one = len(ids) == 1
    return (
        f"{'command' if one else 'commands'} {', '.join(ids)} {'continues' if one else 'continue'}: "
        f"`leasehold get commands {' '.join(ids)}` shows {'its state' if one else 'their states'}"
    )


def about(label: str, message: str) -> str:
    """A message that names its target."""
    is_named = re.search(rf"(?<![\w.-]){re.escape(label)}(?![\w-])", message)
    return message if is_named else f"{label}: {message}"
