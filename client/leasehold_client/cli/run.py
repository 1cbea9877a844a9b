"""``leasehold run``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.gpu_names import resolve_list
from leasehold_client.cli.eviction_options import Eviction, eviction_options
from leasehold_client.cli.lookups import known_gpus
from leasehold_client.cli.resource_options import helper_options, resource_options
from leasehold_client.cli.verb import (
    CommandOptions,
    command_options,
    hold_option,
    preempt_option,
    verb,
    workload_list,
)
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import HelperTerms, Resources

    from leasehold_client.coordinator.client import Client


@click.command(context_settings={"allow_interspersed_args": False})
@resource_options
@click.option(
    "--gpu",
    "gpu_names",
    multiple=True,
    metavar="GPU",
    help="Use exactly this GPU: a UUID, a unique prefix of a UUID, or worker/slot; may be repeated.",
)
@hold_option
@preempt_option
@helper_options
@eviction_options
@click.option(
    "--worker", default="", help="Name or id of the worker.  [default: the one with most free GPUs]"
)
@click.option("--name", default="", help="Name of the workload.  [default: generated]")
@click.option(
    "--env",
    "environment",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an environment variable; may be repeated.",
)
@click.option(
    "--env-secret",
    "secrets",
    multiple=True,
    metavar="NAME[=@FILE]",
    help=(
        "Set an environment variable with the value of this environment or of a file, which no response, "
        "report or log shows; may be repeated."
    ),
)
@click.option("--wait-ready", is_flag=True, help="Return once the workload is ready, not just started.")
@click.argument("arguments", nargs=-1, required=True, metavar="-- COMMAND...")
@command_options
@verb
def run(
    client: Client,
    resources: Resources,
    gpu_names: Sequence[str],
    hold_id: str,
    preempt: str,
    helper: HelperTerms | None,
    eviction: Eviction,
    worker: str,
    name: str,
    environment: Sequence[str],
    secrets: Sequence[str],
    wait_ready: bool,
    arguments: Sequence[str],
    options: CommandOptions,
) -> None:
    """Start a workload on a worker. The workload keeps running after this command has returned."""
    from leasehold.v1.workload_pb2 import WorkloadSpec

    from leasehold_client.arguments.secret_variables import secret_variables
    from leasehold_client.cli.conclusion import conclude, conclude_ready

    if wait_ready and not options.wait:
        raise UsageError("--wait-ready and --no-wait exclude each other: give only one of them")
    spec = WorkloadSpec(
        arguments=arguments,
        environment=dict(_variable(text) for text in environment),
        secret_environment=secret_variables(secrets),
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
        hold_id=hold_id,
        preempt=workload_list(preempt),
        timeout_s=options.timeout_s,
    )
    conclude(client, command, workload.name, options)
    if wait_ready:
        conclude_ready(client, workload, options)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"invalid variable {text!r}: write NAME=VALUE")
    return name, value
