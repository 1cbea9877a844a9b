"""``leasehold run``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from leasehold_client.arguments.gpu_names import resolve_list
from leasehold_client.cli.eviction_options import Eviction, eviction_options
from leasehold_client.cli.examples import examples
from leasehold_client.cli.job_command import JobCommand, use_job_file
from leasehold_client.cli.lookups import gpus_to_name
from leasehold_client.cli.names import complete_files, complete_gpus, complete_workers
from leasehold_client.cli.parameter_types import Number, SingleOption
from leasehold_client.cli.resource_options import helper_options, resource_options
from leasehold_client.cli.verb import (
    READY_LIMIT_S,
    CommandOptions,
    command_options,
    hold_option,
    preempt_option,
    verb,
    workload_list,
)
from leasehold_client.display.standard_output import echo, require_open
from leasehold_client.errors import LeaseholdError, OutputError, UsageError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import HelperTerms, Resources

    from leasehold_client.coordinator.client import Client

PRIORITY_LIMIT: Final = 2**31 - 1


@click.command(
    cls=JobCommand,
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "leasehold run --gpus 1 --name one -- python train.py",
        "leasehold run --gpus 1 --attach --rm -- nvidia-smi",
        "leasehold run -f job.toml --name two",
        "leasehold run --gpu alpha/1 --label team=vision --wait-ready -- python serve.py",
    ),
)
@click.option(
    "-f",
    "--file",
    cls=SingleOption,
    metavar="FILE",
    is_eager=True,
    callback=use_job_file,
    shell_complete=complete_files,
    help="Job file in TOML, JSON or YAML; - reads TOML from standard input. Options override the file.",
)
@resource_options
@click.option(
    "--gpu",
    "gpu_names",
    multiple=True,
    metavar="GPU",
    help="Use exactly this GPU: a UUID, a unique prefix of a UUID, or worker/slot; may be repeated.",
    shell_complete=complete_gpus,
)
@hold_option
@preempt_option
@helper_options
@eviction_options
@click.option(
    "--worker",
    cls=SingleOption,
    default="",
    help="Name or id of the worker.  [default: the one with most free GPUs]",
    shell_complete=complete_workers,
)
@click.option("--name", default="", help="Name of the workload.  [default: generated]")
@click.option(
    "--priority",
    type=Number(-PRIORITY_LIMIT, PRIORITY_LIMIT),
    metavar="N",
    help="Priority among waiting workloads: higher first.  [default: 0]",
)
@click.option("--workdir", metavar="DIR", help="Working directory on the worker.  [default: its own]")
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
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Set a label; may be repeated.")
@click.option(
    "--annotation",
    "annotations",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an annotation; may be repeated.",
)
@click.option("--wait-ready", is_flag=True, help="Return once the workload is ready, not just started.")
@click.option(
    "--attach",
    is_flag=True,
    help="Print the output, stop the workload on Ctrl-C, and exit with the code of the program.",
)
@click.option("--rm", "remove", is_flag=True, help="With --attach: delete the record at the end.")
@click.argument("arguments", nargs=-1, required=True, metavar="-- COMMAND...")
@command_options
@verb
def run(
    client: Client,
    file: str | None,
    resources: Resources,
    gpu_names: Sequence[str],
    hold_id: str,
    preempt: str,
    helper: HelperTerms | None,
    eviction: Eviction,
    worker: str,
    name: str,
    priority: int | None,
    workdir: str | None,
    environment: Sequence[str],
    secrets: Sequence[str],
    labels: Sequence[str],
    annotations: Sequence[str],
    wait_ready: bool,
    attach: bool,
    remove: bool,
    arguments: Sequence[str],
    options: CommandOptions,
) -> None:
    """Start a workload on a worker. The workload keeps running after this command has returned.

    With --attach, this command prints the output of the program, and exits with its code, or with 125 if
    Leasehold itself fails. Ctrl-C stops the workload, or cancels its start. A second Ctrl-C does not wait for
    the end. The program has no standard input.
    """
    from leasehold.v1.workload_pb2 import WorkloadSpec

    from leasehold_client.arguments.secret_variables import secret_variables
    from leasehold_client.cli.conclusion import conclude, conclude_ready

    require_open()  # --quiet prints the id
    if wait_ready and not options.wait:
        raise UsageError("--wait-ready and --no-wait exclude each other: give only one of them")
    if attach and (wait_ready or not options.wait or options.is_document):
        raise UsageError(
            "--attach prints the output of the program: leave out --wait-ready, --no-wait and -o"
        )
    if workdir is not None and not workdir.startswith("/"):
        raise UsageError(
            f"--workdir {workdir!r} is not absolute: write a directory of the worker, such as /data"
        )
    if remove and not attach:
        raise UsageError("--rm needs --attach, since nobody else waits for the end of the workload")
    spec = WorkloadSpec(
        arguments=arguments,
        environment=_assignments(environment, "variable", "NAME=VALUE"),
        secret_environment=secret_variables(secrets),
        working_directory=workdir,
        resources=resources,
        priority=priority,
        helper=helper,
        eviction=eviction.policy,
        hooks=eviction.hooks,
        keep_checkpoints=eviction.keep_checkpoints,
    )
    uuids: list[str] = []
    if gpu_names:
        with gpus_to_name(client) as gpus:
            uuids = resolve_list(",".join(gpu_names), gpus)
    workload, command = client.run(
        spec,
        name=name,
        worker=worker,
        gpu_uuids=uuids,
        checkpoint_id=eviction.checkpoint_id,
        labels=_assignments(labels, "label", "KEY=VALUE"),
        annotations=_assignments(annotations, "annotation", "KEY=VALUE"),
        hold_id=hold_id,
        preempt=workload_list(preempt),
        timeout_s=options.timeout_s,
    )
    began = time.monotonic()
    try:
        if attach:
            from leasehold_client.cli.attached_run import attach as attach_to

            attach_to(client, workload, command, options, remove=remove)
        conclude(client, command, workload.name, options)
        if options.quiet and options.wait:
            echo(workload.workload_id)
        if wait_ready:
            limit_s = READY_LIMIT_S if options.wait_s is None else options.wait_s - (time.monotonic() - began)
            conclude_ready(client, workload, options, limit_s)
    except OutputError as error:
        name = workload.name
        removal = f", `leasehold rm workload {name}` deletes its record after the end" if remove else ""
        raise LeaseholdError(
            f"{error.message}; workload {name} was created and is not stopped: `leasehold get workload "
            f"{name}` shows its state, `leasehold logs -f {name}` its output, `leasehold stop {name}` stops "
            f"it{removal}"
        ) from error


def _assignments(texts: Sequence[str], kind: str, form: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"invalid {kind} {text!r}: write {form}")
        if values.setdefault(name, value) != value:
            raise UsageError(f"the {kind} {name!r} has two values: give one")
    return values
