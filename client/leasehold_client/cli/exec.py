"""``leasehold exec``: waits its turn for GPUs of this host, and becomes the command."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from leasehold_client import interrupts
from leasehold_client.cli.eviction_options import Eviction, adoption_options
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED, error_line
from leasehold_client.cli.resource_options import helper_options, resource_options
from leasehold_client.cli.verb import YEAR_S, Seconds
from leasehold_client.config import SOCKET_VARIABLE
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import HelperTerms, Resources

EXIT_REFUSED: Final = 125
EXIT_CANNOT_RUN: Final = 126
EXIT_NOT_FOUND: Final = 127
"""The codes of env(1) and its like: below 125 they are the command's own."""

TOLD_LIMIT: Final = 4096
"""Characters of the command's arguments that are told to the worker."""

PRIORITY_LIMIT: Final = 2**31 - 1

socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path, readable=False),
    envvar=SOCKET_VARIABLE,
    help="The worker's socket.  [default: /run/leasehold/worker.sock, or that of one's own worker]",
)


@click.command("exec", context_settings={"allow_interspersed_args": False})
@partial(resource_options, gpus=1)
@helper_options
@adoption_options
@click.option("--name", default="", help="What to call it.  [default: made up]")
@click.option(
    "--priority",
    type=click.IntRange(-PRIORITY_LIMIT, PRIORITY_LIMIT),
    default=0,
    show_default=True,
    help="Higher goes first; among equals, who came first.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(min=0, max=YEAR_S),
    metavar="SECONDS",
    help="How long to wait; 0 is not at all.  [default: as long as it takes]",
)
@socket_option
@click.argument("arguments", nargs=-1, required=True, metavar="-- COMMAND...")
def exec_command(
    resources: Resources,
    helper: HelperTerms | None,
    eviction: Eviction,
    name: str,
    priority: int,
    wait_s: float | None,
    socket: Path | None,
    arguments: Sequence[str],
) -> None:
    """Run a command on this host with GPUs, as soon as it is its turn.

    It waits, and says for what; then this process becomes the command. So signals, the terminal and the exit
    code are the command's own, and the lease ends with it, however it ends. It is a workload like any other,
    that can be suspended, moved and stopped. What it leaves running is killed.

    Exit codes below 125 are the command's. 125: Leasehold refused; 126: the command can't be run; 127: there
    is no such command; 130: interrupted while it waited.
    """
    program = _find(arguments[0])
    from leasehold.v1 import local_pb2
    from leasehold.v1.local_pb2 import ClaimOpen, ClaimRequest
    from leasehold.v1.workload_pb2 import WorkloadSpec

    from leasehold_client.cli.exec_wait import wait_granted
    from leasehold_client.messages import duration

    interrupts.raise_in_verb()
    spec = WorkloadSpec(
        arguments=_told(arguments),
        resources=resources,
        priority=priority,
        helper=helper,
        eviction=eviction.policy,
        hooks=eviction.hooks,
    )
    opened = ClaimOpen(name=name, spec=spec, wait=duration(wait_s), hold=local_pb2.CLAIM_HOLD_PROCESS)
    try:
        worker, granted = wait_granted(socket, ClaimRequest(open=opened))
    except LeaseholdError as error:
        echo_error(error_line(error.message, error.reason))
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        echo_error("leasehold: interrupted; it waits no longer")
        sys.exit(EXIT_INTERRUPTED)
    with worker:  # gRPC ends in threads of its own, which an execve would cut off with a message
        _become(program, arguments, {**_inherited(), **granted.environment})


def _find(name: str) -> str:
    """The program's path, so that nobody waits for GPUs in vain."""
    path = shutil.which(name)
    if path is not None:
        return path
    there = Path(name).exists() and os.sep in name
    why = "can't be run: make it executable" if there else "is no command here: give its path"
    echo_error(f"leasehold: {name!r} {why}")
    sys.exit(EXIT_CANNOT_RUN if there else EXIT_NOT_FOUND)


def _told(arguments: Sequence[str]) -> list[str]:
    """The arguments as others see them: the first ones, as text. The command gets them as they are."""
    text = [os.fsencode(argument).decode(errors="replace") for argument in arguments]
    lengths = accumulate(len(argument) + 1 for argument in text)
    return [argument for argument, length in zip(text, lengths, strict=True) if length <= TOLD_LIMIT] or text[
        :1
    ]


def _inherited() -> dict[str, str]:
    """The environment that we were started with: where there is no locale, Python sets one (PEP 538)."""
    environment = dict(os.environ)
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment
    if not any(entry.startswith(b"LC_CTYPE=") for entry in entries):
        environment.pop("LC_CTYPE", None)
    return environment


def _become(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes the command, with the signals as a shell would hand them on."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, list(arguments), dict(environment))  # noqa: S606 - what the caller asked for
    except OSError as error:
        echo_error(f"leasehold: {arguments[0]!r} can't be run: {error.strerror}")
        sys.exit(EXIT_CANNOT_RUN)
