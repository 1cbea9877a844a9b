"""``leasehold wait``."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

import click
from click.shell_completion import CompletionItem

from leasehold_client.arguments.selectors import both
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import interrupted
from leasehold_client.cli.names import complete_workloads
from leasehold_client.cli.parameter_types import Seconds, SingleOption
from leasehold_client.cli.selection import Selection, name_list, selection_options
from leasehold_client.cli.verb import READY_LIMIT_S, YEAR_S, output_option, verb
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import Workload

    from leasehold_client.coordinator.client import Client

    TextParameter = click.ParamType[str]
else:  # older versions of click have no generic ParamType
    TextParameter = click.ParamType

CONDITIONS: Final = (
    "ready",
    "ended",
    *(
        f"state={state}"
        for state in ("RUNNING", "SUSPENDED", "CHECKPOINTED", "SLEEPING", "STOPPED", "EXITED")
    ),
)
"""Conditions that a shell completes. Every state is a condition."""


@final
class ConditionType(TextParameter):
    """A click parameter type: ``ready``, ``ended`` or ``state=STATE``, as the client takes it."""

    name = "condition"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Converts ``state=STATE`` to the state."""
        text = str(value)
        if text.lower() in ("ready", "ended"):
            return text.lower()
        key, _, state = text.partition("=")
        if key.lower() != "state" or not state:
            self.fail(f"{text!r} is not a condition: write ready, ended, or state=RUNNING", param, ctx)
        return state.upper()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Completes the condition."""
        return [CompletionItem(one) for one in CONDITIONS if one.startswith(incomplete)]


@click.command(
    epilog=examples(
        "leasehold wait one",
        "leasehold wait one two --for=state=SUSPENDED --timeout 1m",
        "leasehold wait -l job=9 --for=ended --timeout 1d",
    )
)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...", shell_complete=complete_workloads)
@selection_options
@click.option(
    "--for",
    "condition",
    cls=SingleOption,
    type=ConditionType(),
    default="ready",
    metavar="CONDITION",
    help="ready, ended, or state=STATE, such as state=RUNNING.  [default: ready]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0, YEAR_S),
    default=READY_LIMIT_S,
    metavar="SECONDS",
    help=f"Longest wait for all; then exit with 4.  [default: {READY_LIMIT_S:g}]",
)
@output_option
@verb
def wait(client: Client, selection: Selection, condition: str, timeout_s: float, output: str) -> None:
    """Wait until workloads are ready, have ended or are in a state.

    A workload is ready once its readiness probes have succeeded. A workload without probes is ready once it
    uses CUDA, or at once if it has no GPU. A suspended workload is waited for until its restore. The exit
    code is 1 if a workload ends before the condition holds, or if a search finds no workload.
    """
    from leasehold_client.coordinator.workload_watch import STATES
    from leasehold_client.display.documents import echo_message
    from leasehold_client.messages import readiness, workload_state

    if condition not in ("ready", "ended", *STATES):
        raise UsageError(f"{condition!r} is not a state of workloads: choose {', '.join(STATES)}")
    deadline = time.monotonic() + timeout_s
    found: list[Workload] = []
    chosen = selection.matches(client, lambda workload: True)
    if not chosen:
        _require_ended(client, selection, condition)
    elif selection.selector or selection.filter_text:
        _tell_failed(client, selection, {label for label, _ in chosen})
    if len(selection.names) > 1:  # an unknown name is refused now, and a name that is used again has a new id
        chosen = [(label, client.workload(name).workload_id) for label, name in chosen]
    for place, (label, name) in enumerate(chosen, 1):
        left_s = max(0.0, deadline - time.monotonic()) if found else timeout_s
        try:
            found.append(client.wait_workload(name, condition, timeout_s=left_s))
        except LeaseholdError as error:
            error.message = error.message.replace(name, label)  # a search has ids
            if left := name_list([label for label, _ in chosen[place:]]):
                error.message += f"; not looked at: {left}"
            if found:
                _echo_documents(found, output)
            raise
        except KeyboardInterrupt:
            interrupted(f"{label} continues: `leasehold get workloads` shows its state")
        if output == "table":
            echo(f"{label}: {(readiness if condition == 'ready' else workload_state)(found[-1])}")
    if output != "table" and len(chosen) == 1 and not selection.is_search:
        echo_message(found[0], output)
    else:
        _echo_documents(found, output)


def _echo_documents(found: Sequence[Workload], output: str) -> None:
    """Prints workloads as one document. A table was printed meanwhile."""
    from leasehold_client.display.documents import echo_document, to_dict

    if output != "table":
        echo_document({"workloads": [to_dict(one) for one in found]}, output)


def _tell_failed(client: Client, selection: Selection, waited_for: Collection[str]) -> None:
    """Names the matching workloads that have failed before, unless an open one has their name."""
    failed = replace(selection, filter_text=both(selection.filter_text, "state = FAILED"))
    found = failed.search(client, include_ended=True)
    if names := [one.name for one in found if one.name not in waited_for]:
        echo_error(f"leasehold: workloads that match and FAILED before: {name_list(names)}")


def _require_ended(client: Client, selection: Selection, condition: str) -> None:
    """Accepts a search that found no open workload, if it finds ended ones for which the condition holds.

    Raises:
        LeaseholdError: There are none.
    """
    from leasehold_client.coordinator.workload_watch import ENDED, STATES
    from leasehold_client.messages import workload_state

    wanted = ENDED if condition == "ended" else ENDED & {STATES.get(condition)}
    ended = [one for one in selection.search(client, include_ended=True) if one.status.state in ENDED]
    if not ended:
        raise LeaseholdError(
            "no workload matches, so there is nothing to wait for: `leasehold get workloads` lists them"
        )
    if not any(one.status.state in wanted for one in ended):
        listed = name_list([f"{one.name} ({workload_state(one)})" for one in ended])
        hope = "ready" if condition == "ready" else condition
        raise LeaseholdError(f"all workloads that match have ended, so none becomes {hope}: {listed}")
    echo_error("leasehold: all workloads that match have ended")
