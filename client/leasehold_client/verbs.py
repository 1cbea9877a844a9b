"""The verbs of the ``leasehold`` command that talk to a coordinator."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, Final, TypeVar

import click
from google.protobuf.message import Message
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.fleet_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec

from leasehold_client import render
from leasehold_client.client import Client
from leasehold_client.config import load_config
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError
from leasehold_client.gpu_names import pair_in_order, resolve_list, resolve_pair
from leasehold_client.progress import follow

Shown = TypeVar("Shown", bound=Message)

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NO_COORDINATOR: Final = 3
EXIT_INTERRUPTED: Final = 130

coordinator_option = click.option(
    "--coordinator",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_COORDINATOR",
    help="Coordinator to talk to.  [default: 127.0.0.1:7400, or as cli.toml says]",
)
output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print; json has the names of the protos.",
)
no_wait_option = click.option(
    "--no-wait", is_flag=True, help="Return once the command is stored, before it is carried out."
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long the command may wait and take.",
)


def verb(function: Any) -> Any:
    """Gives a verb its client, and turns every error into one line and an exit code."""

    @coordinator_option
    @wraps(function)
    def call(*, coordinator: str | None, **arguments: Any) -> None:
        try:
            with Client(coordinator or load_config().coordinator) as client:
                function(client, **arguments)
        except LeaseholdError as error:
            fail(error)

    return call


def fail(error: LeaseholdError) -> None:
    """Prints an error as one line, and exits with its code."""
    reason = f" ({error.reason})" if error.reason else ""
    click.echo(f"leasehold: {error.message}{reason}", err=True)
    match error:
        case NoCoordinatorError():
            sys.exit(EXIT_NO_COORDINATOR)
        case UsageError():
            sys.exit(EXIT_USAGE)
        case _:
            sys.exit(EXIT_FAILED)


@click.command()
@click.argument("kind", type=click.Choice(["workers", "gpus", "workloads", "commands"]))
@click.argument("name", required=False)
@click.option("-a", "--all", "include_ended", is_flag=True, help="Workloads that have ended too.")
@output_option
@verb
def get(client: Client, kind: str, name: str | None, include_ended: bool, output: str) -> None:
    """List workers, GPUs, workloads or commands, or show the one called NAME."""
    match kind:
        case "workers":
            workers = [client.worker(name)] if name else client.workers()
            _show(kind, name, workers, output, render.echo_workers)
        case "gpus":
            gpus = client.gpus()
            uuids = resolve_list(name, gpus) if name else [gpu.gpu.uuid for gpu in gpus]
            _show(kind, name, [gpu for gpu in gpus if gpu.gpu.uuid in uuids], output, render.echo_gpus)
        case "workloads":
            workloads = [client.workload(name)] if name else client.workloads(include_ended=include_ended)
            places = partial(render.echo_workloads, gpus=client.gpus())
            _show(kind, name, workloads, output, places)
        case _:
            commands = [client.command(name)] if name else client.commands()
            _show(kind, name, commands, output, render.echo_commands)


def _show(
    kind: str,
    name: str | None,
    messages: Sequence[Shown],
    output: str,
    echo: Callable[[Sequence[Shown]], None],
) -> None:
    """Prints what was found: one document, the message itself where it was asked for by name."""
    if output == "json":
        documents = [render.to_dict(message) for message in messages]
        render.echo_json(documents[0] if name and len(documents) == 1 else {kind: documents})
    else:
        echo(messages)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--gpus", "gpu_count", type=click.IntRange(min=0), default=0, show_default=True, help="Whole GPUs."
)
@click.option("--worker", default="", help="Where, by name or id.  [default: where most GPUs are free]")
@click.option("--name", default="", help="What to call it.  [default: made up]")
@click.option("--env", "environment", multiple=True, metavar="K=V", help="Variable to set; may be repeated.")
@click.argument("arguments", nargs=-1, required=True, metavar="-- COMMAND...")
@no_wait_option
@timeout_option
@output_option
@verb
def run(
    client: Client,
    gpu_count: int,
    worker: str,
    name: str,
    environment: Sequence[str],
    arguments: Sequence[str],
    no_wait: bool,
    timeout_s: float | None,
    output: str,
) -> None:
    """Start a workload on a worker. It runs on when this command has returned."""
    spec = WorkloadSpec(
        arguments=arguments,
        environment=dict(_variable(text) for text in environment),
        resources=Resources(gpu_count=gpu_count),
    )
    workload, command = client.run(spec, name=name, worker=worker, timeout_s=timeout_s)
    conclude(client, command, workload.name, no_wait=no_wait, output=output)


@click.command()
@click.argument("workload")
@no_wait_option
@timeout_option
@output_option
@verb
def suspend(client: Client, workload: str, no_wait: bool, timeout_s: float | None, output: str) -> None:
    """Park a workload: its device memory moves to host memory, and its GPUs are free for others."""
    command = client.suspend(workload, timeout_s=timeout_s)
    conclude(client, command, workload, no_wait=no_wait, output=output)


@click.command()
@click.argument("workload")
@click.option("--to", metavar="GPU,...", help="GPUs to wake on, in the workload's order.")
@no_wait_option
@timeout_option
@output_option
@verb
def restore(
    client: Client, workload: str, to: str | None, no_wait: bool, timeout_s: float | None, output: str
) -> None:
    """Wake a parked workload: on the same GPUs if they are free, else on others of the same chip."""
    uuids = resolve_list(to, client.gpus()) if to is not None else []
    command = client.restore(workload, gpu_uuids=uuids, timeout_s=timeout_s)
    conclude(client, command, workload, no_wait=no_wait, output=output)


@click.command()
@click.argument("workload")
@click.option(
    "--pair", "pairs", multiple=True, metavar="OLD=NEW", help="NEW takes OLD's place; may be repeated."
)
@click.option("--to", metavar="GPU,...", help="GPUs to move to, in the workload's order.")
@no_wait_option
@timeout_option
@output_option
@verb
def remap(
    client: Client,
    workload: str,
    pairs: Sequence[str],
    to: str | None,
    no_wait: bool,
    timeout_s: float | None,
    output: str,
) -> None:
    """Move a running workload to other GPUs of its worker, without its knowing.

    A GPU is a UUID, a unique beginning of one, or worker/slot.
    """
    if bool(pairs) == (to is not None):
        raise UsageError("remap needs either --pair OLD=NEW or --to GPU,...: give one of them")
    gpus = client.gpus()
    if to is None:
        moves = [resolve_pair(text, gpus) for text in pairs]
    else:
        held = client.workload(workload).status.lease.gpu_uuids
        moves = pair_in_order(held, resolve_list(to, gpus))
    command = client.remap(workload, moves, timeout_s=timeout_s)
    conclude(client, command, workload, no_wait=no_wait, output=output)


@click.command()
@click.argument("workload")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL.  [default: 10]",
)
@no_wait_option
@timeout_option
@output_option
@verb
def stop(
    client: Client,
    workload: str,
    grace_s: float | None,
    no_wait: bool,
    timeout_s: float | None,
    output: str,
) -> None:
    """End a workload. One that is parked is killed at once, since it can't end by itself."""
    command = client.stop(workload, grace_s=grace_s, timeout_s=timeout_s)
    conclude(client, command, workload, no_wait=no_wait, output=output)


@click.command()
@click.argument("workload")
@click.option("-f", "--follow", "follow_output", is_flag=True, help="Go on until the workload has ended.")
@verb
def logs(client: Client, workload: str, follow_output: bool) -> None:
    """Print what a workload wrote."""
    try:
        for data in client.output(workload, follow=follow_output):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Who reads has enough. Python would complain of it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def conclude(client: Client, command: Command, workload: str, *, no_wait: bool, output: str) -> None:
    """Waits for a command, prints what it did, and exits with 1 unless it succeeded."""
    if not no_wait:
        try:
            command = follow(client, command)
        except KeyboardInterrupt:
            click.echo(
                f"leasehold: interrupted; command {command.command_id} goes on: "
                f"`leasehold get commands {command.command_id}` shows it",
                err=True,
            )
            sys.exit(EXIT_INTERRUPTED)
    succeeded = command.state == COMMAND_STATE_SUCCEEDED
    if output == "json":
        render.echo_json(render.to_dict(command))
    elif no_wait:
        click.echo(f"{workload}: {render.operation_name(command)} stored as command {command.command_id}")
    elif succeeded:
        render.echo_outcome(command, workload, _gpus_if_known(client))
    if not no_wait and not succeeded:
        _echo_failure(command)
        sys.exit(EXIT_FAILED)


def _gpus_if_known(client: Client) -> list[FleetGpu]:
    """The GPUs, for their short names; none where the coordinator has gone since. What was done is done."""
    try:
        return client.gpus()
    except NoCoordinatorError:
        return []


def _echo_failure(command: Command) -> None:
    reason = ErrorReason.Name(command.error.reason).removeprefix("ERROR_REASON_")
    state = render.command_state(command)
    lines: Iterable[str] = [
        f"leasehold: {render.operation_name(command)} {state}: {command.error.message} ({reason})",
        *render.member_lines(command),
    ]
    for line in lines:
        click.echo(line, err=True)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r} is not a variable: write K=V")
    return name, value


VERBS: Final[tuple[click.Command, ...]] = (get, run, suspend, restore, remap, stop, logs)
