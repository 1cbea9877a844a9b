"""The end of a dry run: prints the plans and exits with their code."""

import sys
from collections.abc import Callable, Sequence

from leasehold.v1.plan_pb2 import Plan

from leasehold_client.arguments.gpu_names import gpu_places, with_places
from leasehold_client.cli.command_waits import about
from leasehold_client.cli.exit_codes import EXIT_FAILED, error_line
from leasehold_client.cli.lookups import gpus_if_known, names_if_several
from leasehold_client.cli.verb import CommandOptions
from leasehold_client.coordinator.client import Client
from leasehold_client.display.documents import echo_document, to_dict
from leasehold_client.display.plan_view import echo_plan
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_client.messages import reason_name


def conclude_plan(client: Client, plan: Plan, workload: str, verb: str, options: CommandOptions) -> None:
    """Prints a plan, and exits with 1 if the plan has a refusal."""
    conclude_plans(client, [(workload, lambda: plan)], verb, options)


def conclude_plans(
    client: Client,
    plans: Sequence[tuple[str, Callable[[], Plan]]],
    verb: str,
    options: CommandOptions,
    *,
    is_search: bool = False,
) -> None:
    """Prints plans, and exits with 1 if any plan is refused or has a refusal.

    Args:
        client: The client.
        plans: Name of each target, and a function that makes its plan.
        verb: The planned verb.
        options: Output format. In JSON, a single plan is a document. Several, and those of a search, are
            ``{"plans": […]}``.
        is_search: Whether the targets were searched. There may be none.
    """
    gpus = gpus_if_known(client)
    places = gpu_places(gpus)
    documents: list[dict[str, object]] = []
    lines: list[str] = []
    for label, make in plans:
        try:
            plan = make()
        except NoCoordinatorError:
            raise
        except LeaseholdError as error:
            if len(plans) == 1 and not is_search:
                raise
            lines.append(error_line(with_places(about(label, error.message), places), error.reason))
            continue
        if options.is_document:
            documents.append(to_dict(plan))
        else:
            echo_plan(plan, label, verb, gpus, names_if_several(client, plan))
        for refusal in plan.refusals:
            message = with_places(refusal.message, places)
            shown = message if len(plans) == 1 else about(label, message)
            lines.append(error_line(shown, reason_name(refusal.reason)))
    if options.is_document:
        is_list = is_search or len(plans) > 1
        echo_document({"plans": documents} if is_list else documents[0], options.output)
    for line in lines:
        echo_error(line)
    if lines:
        sys.exit(EXIT_FAILED)
