"""The end of ``leasehold cancel``: waits for the commands, prints the outcomes and exits with their code."""

import sys
from collections.abc import Sequence

from leasehold.v1.command_pb2 import COMMAND_STATE_CANCELLED, COMMAND_STATE_SUCCEEDED, Command

from leasehold_client.cli.command_waits import Stop, leave, wait_for_all
from leasehold_client.cli.exit_codes import EXIT_FAILED, EXIT_WAIT_TIMEOUT, echo_failure, error_line
from leasehold_client.cli.lookups import with_short_names
from leasehold_client.cli.verb import CommandOptions
from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.command_watch import has_ended
from leasehold_client.display import standard_output
from leasehold_client.display.documents import echo_document, to_dict
from leasehold_client.display.outcome import failure_lines, member_lines, warning_lines
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, WaitTimeoutError
from leasehold_client.messages import command_state, operation_name


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
        ended, stop = wait_for_all(
            client, [(command.command_id, command, None) for command in commands], options, failures
        )
    if options.is_document:
        printed = [to_dict(command) for _, command in ended]
        echo_document({"commands": printed} if is_list else printed[0], options.output)
    ended_before = {command.command_id for command in commands if has_ended(command.state)}
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
        elif command.command_id in ended_before:
            is_uncancelled = True
            first = (
                f"{command.command_id} had ended already: {operation_name(command)} {command_state(command)}"
            )
            echo_failure([first, *member_lines(command), *warning_lines(command)])
        elif command.state == COMMAND_STATE_SUCCEEDED:
            is_uncancelled = True
            first = f"{command.command_id} was not cancelled: {operation_name(command)} SUCCEEDED"
            echo_failure([first, *warning_lines(command)])
        else:
            is_uncancelled = True
            first, *others = failure_lines(command)
            echo_failure([f"{command.command_id} was not cancelled: {first}", *others])
    for failure in failures.values():
        if isinstance(failure, WaitTimeoutError):
            failure.message += (
                "; its cancellation is stored, and takes effect once its worker is in contact and the "
                "present step has ended"
            )
        echo_error(error_line(with_short_names(client, failure.message), failure.reason))
    leave(stop, ended)
    if is_uncancelled or not all(isinstance(failure, WaitTimeoutError) for failure in failures.values()):
        sys.exit(EXIT_FAILED)
    if failures:
        sys.exit(EXIT_WAIT_TIMEOUT)
