"""The verbs of the ``leasehold`` command that talk to a coordinator."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import click
from google.protobuf.message import Message
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.fleet_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec

from leasehold_client import render, standard_output
from leasehold_client.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError
from leasehold_client.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, interrupted
from leasehold_client.gpu_names import pair_in_order, resolve_list, resolve_pair
from leasehold_client.progress import follow
from leasehold_client.verb import YEAR_S, Seconds, no_wait_option, output_option, timeout_option, verb

Shown = TypeVar("Shown", bound=Message)


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
            gpus = _known_gpus(client)
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


def _known_gpus(client: Client) -> list[FleetGpu]:
    """The GPUs that are known; says which workers have not told theirs: that is not "none"."""
    listed = client.list_gpus()
    if listed.unreachable:
        click.echo(
            f"leasehold: not heard from since the coordinator started: {', '.join(listed.unreachable)}; "
            "the GPUs of these workers are not known",
            err=True,
        )
    return list(listed.gpus)


@click.command(context_settings={"allow_interspersed_args": False})
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
    uuids = resolve_list(to, _known_gpus(client)) if to is not None else []
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
    gpus = _known_gpus(client)
    if to is None:
        moves = [resolve_pair(text, gpus) for text in pairs]
    else:
        moves = pair_in_order(_held_gpus(client, workload), resolve_list(to, gpus))
    command = client.remap(workload, moves, timeout_s=timeout_s)
    conclude(client, command, workload, no_wait=no_wait, output=output)


def _held_gpus(client: Client, name: str) -> Sequence[str]:
    workload = client.workload(name)
    if not workload.status.HasField("lease"):
        raise LeaseholdError(
            f"{name} is {render.workload_state(workload)} and holds no GPU that could be moved: "
            "one that is parked is restored elsewhere with `leasehold restore --to`",
            "WRONG_STATE",
        )
    return workload.status.lease.gpu_uuids


@click.command()
@click.argument("workload")
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(min=0, max=YEAR_S),
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
            if not standard_output.write(data):
                break
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # nothing was begun that could go on


def conclude(client: Client, command: Command, workload: str, *, no_wait: bool, output: str) -> None:
    """Waits for a command, prints what it did, and exits with 1 unless it succeeded."""
    if not no_wait:
        command = _wait(client, command)
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
        first, *members = render.failure_lines(command)
        click.echo("\n".join([f"leasehold: {first}", *members]), err=True)
        sys.exit(EXIT_FAILED)


def _wait(client: Client, command: Command) -> Command:
    goes_on = f"command {command.command_id} goes on: `leasehold get commands {command.command_id}` shows it"
    try:
        return follow(client, command)
    except KeyboardInterrupt:
        interrupted(goes_on)
    except NoCoordinatorError as error:
        raise NoCoordinatorError(f"{error.message}; {goes_on}") from error


def _gpus_if_known(client: Client) -> list[FleetGpu]:
    """The GPUs, for their short names; none where the coordinator has gone since. What was done is done."""
    try:
        return client.gpus()
    except LeaseholdError:
        return []


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r} is not a variable: write K=V")
    return name, value


VERBS: Final[tuple[click.Command, ...]] = (get, run, suspend, restore, remap, stop, logs)
