"""What verbs look up in the fleet, and what they say where a worker has not reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError

if TYPE_CHECKING:
    from leasehold.v1.checkpoint_pb2 import Checkpoint
    from leasehold.v1.fleet_pb2 import FleetGpu
    from leasehold.v1.plan_pb2 import Plan

    from leasehold_client.coordinator.client import Client


def known_gpus(client: Client) -> list[FleetGpu]:
    """The GPUs that are known; says which workers have not told theirs: that is not "none"."""
    listed = client.list_gpus()
    if listed.unreachable:
        echo_error(
            f"leasehold: not heard from since the coordinator started: {', '.join(listed.unreachable)}; "
            "the GPUs of these workers are not known",
        )
    return list(listed.gpus)


def known_checkpoints(client: Client, workload: str = "") -> list[Checkpoint]:
    """The checkpoints that are known; says which workers have not told theirs: that is not "none".

    Args:
        client: Where to ask.
        workload: Only those of the workload with this id or name. Empty: of all.
    """
    listed = client.list_checkpoints(workload=workload)
    if listed.unreachable:
        silent = ", ".join(worker_names(client).get(one, one) for one in listed.unreachable)
        echo_error(f"leasehold: these workers did not answer: {silent}; their checkpoints are not known")
    return list(listed.checkpoints)


def worker_names(client: Client) -> Mapping[str, str]:
    """Names of workers by id."""
    return {worker.worker_id: worker.name for worker in client.workers()}


def with_short_names(client: Client, text: str) -> str:
    """A text of a daemon, which names GPUs by UUID, with their short names where they are known."""
    from leasehold_client.arguments.gpu_names import gpu_places, names_gpus, with_places

    if not names_gpus(text):
        return text
    return with_places(text, gpu_places(gpus_if_known(client)))


def gpus_if_known(client: Client) -> list[FleetGpu]:
    """The GPUs, for their short names; none where the coordinator has gone since. What was done is done."""
    try:
        return client.gpus()
    except LeaseholdError:
        return []


def names_if_several(client: Client, plan: Plan) -> dict[str, str]:
    """The names of workloads by id; none where the plan is about one, or the coordinator has gone since."""
    ids = {member.workload_id for member in plan.members} | {check.workload_id for check in plan.checks}
    if len(ids - {""}) < 2:
        return {}
    try:
        return {workload.workload_id: workload.name for workload in client.workloads()}
    except LeaseholdError:
        return {}
