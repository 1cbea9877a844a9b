"""The verbs of the ``leasehold`` command that talk to a coordinator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from leasehold_client import standard_output
from leasehold_client.checkpointing import echo_checkpoints, known_checkpoints
from leasehold_client.errors import UsageError
from leasehold_client.eviction_options import Eviction, eviction_options
from leasehold_client.exit_codes import EXIT_INTERRUPTED
from leasehold_client.gpu_names import resolve_list
from leasehold_client.moving import known_gpus
from leasehold_client.resource_options import helper_options, resource_options
from leasehold_client.standard_output import echo
from leasehold_client.verb import (
    READY_LIMIT_S,
    WEEK_S,
    YEAR_S,
    Seconds,
    output_option,
    timeout_option,
    verb,
    waiting_options,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from leasehold.v1.workload_pb2 import HelperTerms, Resources

    from leasehold_client.client import Client
    from leasehold_client.watching import Waiting
    from leasehold_client.workload_wait import Condition

Shown = TypeVar("Shown", bound="Message")


@click.command()
@click.argument(
    "kind", type=click.Choice(["workers", "gpus", "workloads", "checkpoints", "commands", "events"])
)
@click.argument("name", required=False)
@click.option("-a", "--all", "include_ended", is_flag=True, help="Workloads that have ended too.")
@output_option
@verb
def get(client: Client, kind: str, name: str | None, include_ended: bool, output: str) -> None:
    """List workers, GPUs, workloads, checkpoints, commands or events, or show the one called NAME.

    Checkpoints and events are those of the workload called NAME.
    """
    from leasehold_client import fleet_view, render

    match kind:
        case "workers":
            workers = [client.worker(name)] if name else client.workers()
            _show(kind, name, workers, output, fleet_view.echo_workers)
        case "gpus":
            gpus = known_gpus(client)
            uuids = resolve_list(name, gpus) if name else [gpu.gpu.uuid for gpu in gpus]
            _show(kind, name, [gpu for gpu in gpus if gpu.gpu.uuid in uuids], output, fleet_view.echo_gpus)
        case "workloads":
            workloads = [client.workload(name)] if name else client.workloads(include_ended=include_ended)
            places = partial(fleet_view.echo_workloads, gpus=client.gpus())
            _show(kind, name, workloads, output, places)
        case "checkpoints":
            checkpoints = known_checkpoints(client, name or "")
            _show(kind, None, checkpoints, output, partial(echo_checkpoints, client=client))
        case "events":
            events = client.events(name or "")
            _show(kind, None, events, output, render.echo_events)
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
        from leasehold_client import render

        documents = [render.to_dict(message) for message in messages]
        render.echo_json(documents[0] if name and len(documents) == 1 else {kind: documents})
    else:
        echo(messages)


@click.command(context_settings={"allow_interspersed_args": False})
@resource_options
@click.option(
    "--gpu",
    "gpu_names",
    multiple=True,
    metavar="GPU",
    help="This very GPU, by UUID, a unique beginning of it, or worker/slot; may be repeated.",
)
@helper_options
@eviction_options
@click.option("--worker", default="", help="Where, by name or id.  [default: where most GPUs are free]")
@click.option("--name", default="", help="What to call it.  [default: made up]")
@click.option("--env", "environment", multiple=True, metavar="K=V", help="Variable to set; may be repeated.")
@click.option("--wait-ready", is_flag=True, help="Return once it is ready, and not only started.")
@click.argument("arguments", nargs=-1, required=True, metavar="-- COMMAND...")
@waiting_options()
@timeout_option
@output_option
@verb
def run(
    client: Client,
    resources: Resources,
    gpu_names: Sequence[str],
    helper: HelperTerms | None,
    eviction: Eviction,
    worker: str,
    name: str,
    environment: Sequence[str],
    wait_ready: bool,
    arguments: Sequence[str],
    waiting: Waiting,
    timeout_s: float | None,
    output: str,
) -> None:
    """Start a workload on a worker. It runs on when this command has returned."""
    from leasehold.v1.workload_pb2 import WorkloadSpec

    from leasehold_client.conclusion import conclude, conclude_ready

    if wait_ready and not waiting.wanted:
        raise UsageError("--wait-ready and --no-wait contradict each other: give one of them")
    spec = WorkloadSpec(
        arguments=arguments,
        environment=dict(_variable(text) for text in environment),
        resources=resources,
        helper=helper,
        eviction=eviction.policy,
        hooks=eviction.hooks,
        keep_checkpoints=eviction.keep_checkpoints,
    )
    uuids = resolve_list(",".join(gpu_names), known_gpus(client)) if gpu_names else []
    workload, command = client.run(
        spec,
        name=name,
        worker=worker,
        gpu_uuids=uuids,
        checkpoint_id=eviction.checkpoint_id,
        timeout_s=timeout_s,
    )
    conclude(client, command, workload.name, waiting=waiting, output=output)
    if wait_ready:
        conclude_ready(client, workload, waiting=waiting, output=output)


@click.command()
@click.argument("workload")
@click.option(
    "--for",
    "condition",
    type=click.Choice(["ready", "ended"]),
    default="ready",
    show_default=True,
    help="What to wait for.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0, max=YEAR_S),
    default=READY_LIMIT_S,
    metavar="SECONDS",
    help=f"How long to wait; then exit with 4.  [default: {READY_LIMIT_S:g}]",
)
@output_option
@verb
def wait(client: Client, workload: str, condition: Condition, timeout_s: float, output: str) -> None:
    """Wait until a workload is ready, or has ended.

    One is ready once its readiness probes have succeeded; without probes, once it uses CUDA, or at once if it
    has no GPU. If it ends before it is ready, the exit code is 1.
    """
    from leasehold_client import render

    found = client.wait_workload(workload, condition, timeout_s=timeout_s)
    if output == "json":
        render.echo_json(render.to_dict(found))
    else:
        echo(f"{workload}: {'ready' if condition == 'ready' else render.workload_state(found)}")


@click.command()
@click.argument("workload")
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(min=0, max=WEEK_S),
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL.  [default: 10]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Kill restored processes even if they can't be suspended first, which can hang their host.",
)
@waiting_options()
@timeout_option
@output_option
@verb
def stop(
    client: Client,
    workload: str,
    grace_s: float | None,
    force: bool,
    waiting: Waiting,
    timeout_s: float | None,
    output: str,
) -> None:
    """End a workload. One that is parked is killed at once, since it can't end by itself."""
    from leasehold_client.conclusion import conclude

    command = client.stop(workload, grace_s=grace_s, force=force, timeout_s=timeout_s)
    conclude(client, command, workload, waiting=waiting, output=output)


@click.command()
@click.argument("command_id", metavar="COMMAND")
@waiting_options("Return once it is asked for, before the command has ended.")
@output_option
@verb
def cancel(client: Client, command_id: str, waiting: Waiting, output: str) -> None:
    """Cancel a command that has not ended.

    What it had begun is undone, unless it is so far that it is finished instead: then this fails.
    """
    from leasehold_client.conclusion import conclude_cancel

    conclude_cancel(client, client.cancel(command_id), waiting=waiting, output=output)


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


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r} is not a variable: write K=V")
    return name, value
