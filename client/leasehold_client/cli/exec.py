"""``leasehold exec``: waits for GPUs of this host, and executes a command in its own process."""

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
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED, error_line, not_utf8
from leasehold_client.cli.parameter_types import GivenPath, Number, Seconds
from leasehold_client.cli.program_command import EXIT_REFUSED, ProgramCommand
from leasehold_client.cli.resource_options import helper_options, resource_options
from leasehold_client.cli.verb import YEAR_S
from leasehold_client.config import SOCKET_VARIABLE
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import HelperTerms, Resources

EXIT_CANNOT_RUN: Final = 126
EXIT_NOT_FOUND: Final = 127
"""Exit codes of env(1) and similar programs. Codes below 125 are the command's own."""

ARGUMENTS_LIMIT: Final = 4096
"""Characters of the command's arguments that the worker gets for display."""

PRIORITY_LIMIT: Final = 2**31 - 1

socket_option = click.option(
    "--socket",
    type=GivenPath(path_type=Path, readable=False),
    envvar=SOCKET_VARIABLE,
    help=(
        "The worker's socket.  [default: /run/leasehold/worker/worker.sock, or the socket of your own worker]"
    ),
)


@click.command(
    "exec",
    cls=ProgramCommand,
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "leasehold exec -- python train.py",
        "leasehold exec --gpus 2 --wait 1h -- torchrun --nproc-per-node 2 train.py",
    ),
)
@partial(resource_options, gpus=1)
@helper_options
@adoption_options
@click.option("--name", default="", help="Name of the workload.  [default: generated]")
@click.option(
    "--priority",
    type=Number(-PRIORITY_LIMIT, PRIORITY_LIMIT),
    default=0,
    show_default=True,
    help="Priority in the queue: higher first, then first come, first served.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(0, YEAR_S),
    metavar="SECONDS",
    help="Longest wait for the GPUs; 0: no wait.  [default: no limit]",
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
    """Run a command with GPUs of this host, once they are granted.

    While the claim waits, its place in the queue is printed. Then this process executes the command, so
    signals, the terminal and the exit code are the command's own. The command is a workload, which can be
    suspended, moved and stopped. The lease ends when the command ends. Processes that the command leaves
    behind are killed.

    Exit codes below 125 are the command's. 125: refused by Leasehold; 126: the command is not executable;
    127: the command was not found; 130: interrupted during the wait.
    """
    program = _find(arguments[0])
    from leasehold.local.v1 import local_service_pb2
    from leasehold.local.v1.local_service_pb2 import ClaimOpen, ClaimRequest
    from leasehold.v1.workload_pb2 import WorkloadSpec

    from leasehold_client.cli.exec_wait import wait_granted
    from leasehold_client.messages import duration

    interrupts.raise_in_call()
    hold = local_service_pb2.CLAIM_HOLD_PROCESS
    try:
        spec = WorkloadSpec(
            arguments=_shown(arguments),
            resources=resources,
            priority=priority,
            helper=helper,
            eviction=eviction.policy,
            hooks=eviction.hooks,
        )
        opened = ClaimOpen(name=name, spec=spec, wait=duration(wait_s), hold=hold)
        worker, granted = wait_granted(socket, ClaimRequest(open=opened))
    except UnicodeEncodeError as error:
        echo_error(error_line(not_utf8(error).message, ""))
        sys.exit(EXIT_REFUSED)
    except LeaseholdError as error:
        echo_error(error_line(error.message, error.reason))
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        echo_error("leasehold: interrupted; the claim is withdrawn")
        sys.exit(EXIT_INTERRUPTED)
    with worker:  # an execve would cut off gRPC's threads, which print a message then
        _become(program, arguments, {**_inherited(), **granted.environment})


def _find(name: str) -> str:
    """The program's path. Exits if there is none, before the claim waits for GPUs."""
    path = shutil.which(name)
    if path is not None:
        return path
    there = Path(name).exists() and os.sep in name
    why = "is not executable: make it executable" if there else "was not found: give its path"
    echo_error(f"leasehold: the command {name!r} {why}")
    sys.exit(EXIT_CANNOT_RUN if there else EXIT_NOT_FOUND)


def _shown(arguments: Sequence[str]) -> list[str]:
    """The first arguments as text, for display. The command gets the original arguments."""
    text = [os.fsencode(argument).decode(errors="replace") for argument in arguments]
    lengths = accumulate(len(argument) + 1 for argument in text)
    return [
        argument for argument, length in zip(text, lengths, strict=True) if length <= ARGUMENTS_LIMIT
    ] or text[:1]


def _inherited() -> dict[str, str]:
    """The original environment, without the locale that Python may have set (PEP 538)."""
    environment = dict(os.environ)
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment
    if not any(entry.startswith(b"LC_CTYPE=") for entry in entries):
        environment.pop("LC_CTYPE", None)
    return environment


def _become(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Executes the command, with the signal actions that a shell would pass on."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and execve keeps ignored signals
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, list(arguments), dict(environment))  # noqa: S606 - the purpose of this verb
    except OSError as error:
        echo_error(f"leasehold: the command {arguments[0]!r} can't be executed: {error.strerror}")
        sys.exit(EXIT_CANNOT_RUN)
