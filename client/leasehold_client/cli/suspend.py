"""``leasehold suspend``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.caller import caller
from leasehold_client.cli.eviction_options import policy_options
from leasehold_client.cli.examples import examples
from leasehold_client.cli.names import complete_running, complete_workers
from leasehold_client.cli.parameter_types import Seconds, SingleOption
from leasehold_client.cli.selection import Selection, selection_options
from leasehold_client.cli.verb import (
    HOLD_LIMIT_S,
    CommandOptions,
    command_options,
    dry_run_option,
    lock_timeout_option,
    verb,
)
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from leasehold.v1.command_pb2 import Command
    from leasehold.v1.eviction_pb2 import EvictionPolicy
    from leasehold.v1.workload_service_pb2 import SuspendWorkerResponse, WorkloadRefusal

    from leasehold_client.coordinator.client import Client


@click.command(
    epilog=examples(
        "leasehold suspend one",
        "leasehold suspend one --dry-run",
        "leasehold suspend one two --process checkpoint",
        "leasehold suspend --worker alpha",
        "leasehold suspend -l tier=dev",
    )
)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...", shell_complete=complete_running)
@selection_options
@click.option(
    "--worker",
    cls=SingleOption,
    metavar="WORKER",
    help="Suspend every workload that holds GPUs of this worker.",
    shell_complete=complete_workers,
)
@policy_options
@click.option(
    "--force",
    is_flag=True,
    help="Suspend even if this frees no GPU memory or loses the state of the workload.",
)
@click.option(
    "--hold-for",
    "hold_for_s",
    type=Seconds(0.001, HOLD_LIMIT_S),
    metavar="SECONDS",
    help="Keep the freed GPUs reserved for `run --hold` or `restore --hold`, for at most 10 minutes (10m).",
)
@dry_run_option
@lock_timeout_option
@command_options
@verb
def suspend(
    client: Client,
    selection: Selection,
    worker: str | None,
    policy: EvictionPolicy | None,
    force: bool,
    hold_for_s: float | None,
    dry_run: bool,
    lock_timeout_s: float | None,
    options: CommandOptions,
) -> None:
    """Suspend workloads and free their GPUs for others.

    The eviction policy of each workload (run --evict) applies, unless --weights or --process is given. A
    suspended workload is moved to a stronger process strategy if you ask for one. If the workload is not
    ready, the command first waits for its readiness, within --wait-timeout or else --timeout.

    With --hold-for, nobody else gets the freed GPUs until `run --hold` or `restore --hold` has taken them,
    the time is over, or `release --hold` gives them up.

    With --all, -l or --filter, the workloads that hold GPUs are searched. With --worker, every workload that
    holds GPUs of the worker is suspended, the oldest first. A workload that can't be suspended is reported
    and does not delay the others.
    """
    from leasehold_client.cli.conclusion import conclude, conclude_all
    from leasehold_client.cli.plan_conclusion import conclude_plans

    if worker is not None:
        if selection.names or selection.is_search or dry_run or hold_for_s is not None:
            raise UsageError(
                "--worker suspends everything on a worker: leave out workloads, -l, --filter, --all, "
                "--dry-run and --hold-for"
            )
        answer = client.suspend_worker(
            worker, policy=policy, force=force, lock_timeout_s=lock_timeout_s, timeout_s=options.timeout_s
        )
        each = _each(client, answer)
        if not each:
            echo_error(f"leasehold: no workload holds GPUs of {worker}, so nothing was done")
        conclude_all(client, each, options, is_search=True)
        return
    chosen = selection.find(client, lambda workload: workload.status.HasField("lease"))
    if dry_run:
        plan = partial(client.plan_suspend, policy=policy, force=force, lock_timeout_s=lock_timeout_s)
        plans = [(label, partial(plan, name)) for label, name in chosen]
        conclude_plans(client, plans, "suspend", options, is_search=selection.is_search)
        return
    ask = partial(
        client.suspend,
        policy=policy,
        force=force,
        lock_timeout_s=lock_timeout_s,
        hold_for_s=hold_for_s,
        held_by="" if hold_for_s is None else caller(),
        timeout_s=options.timeout_s,
    )
    if not selection.is_search and len(chosen) == 1:
        [(label, name)] = chosen
        conclude(client, ask(name), label, options, again=partial(ask, name))
    else:
        each = [(label, partial(ask, name)) for label, name in chosen]
        conclude_all(client, each, options, is_search=selection.is_search, may_retry=True)


def _same(command: Command) -> Command:
    return command


def _each(client: Client, answer: SuspendWorkerResponse) -> list[tuple[str, Callable[[], Command]]]:
    """Names each workload, with a function that returns its command or raises its refusal."""
    from leasehold_client.messages import reason_name

    names: dict[str, str] = {}
    with suppress(LeaseholdError):  # the commands are stored all the same
        names = {workload.workload_id: workload.name for workload in client.workloads()}

    def refuse(refusal: WorkloadRefusal) -> Command:
        error = refusal.error
        message = f"{refusal.workload_name}: {error.message}"
        raise LeaseholdError(message, reason_name(error.reason))

    each: list[tuple[str, Callable[[], Command]]] = [
        (names.get(command.workload_id, command.workload_id), partial(_same, command))
        for command in answer.commands
    ]
    return [*each, *((refusal.workload_name, partial(refuse, refusal)) for refusal in answer.refusals)]
