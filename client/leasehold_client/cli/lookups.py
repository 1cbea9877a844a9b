"""Lookups of GPUs, checkpoints and names, with warnings about workers that have not reported."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, final

from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from leasehold.v1.checkpoint_pb2 import Checkpoint
    from leasehold.v1.plan_pb2 import Plan
    from leasehold.v1.worker_pb2 import FleetGpu

    from leasehold_client.coordinator.client import Client

LOOKUP_INTERVAL_S: Final = 10.0


def known_gpus(client: Client, filter_text: str = "", order_by: str = "") -> list[FleetGpu]:
    """The known GPUs. Warns about workers whose GPUs are unknown, which does not mean none.

    Args:
        client: The client.
        filter_text: Which GPUs, as for :meth:`Client.gpus`.
        order_by: How to sort them, likewise.
    """
    listed = client.list_gpus(filter=filter_text, order_by=order_by)
    _warn_of_unknown_gpus(client, listed.unreachable)
    return list(listed.gpus)


@contextmanager
def gpus_to_name(client: Client) -> Iterator[list[FleetGpu]]:
    """The known GPUs, for a context that resolves names of GPUs.

    If a name does not resolve, it warns about workers whose GPUs are unknown.
    """
    listed = client.list_gpus()
    try:
        yield list(listed.gpus)
    except UsageError:
        _warn_of_unknown_gpus(client, listed.unreachable)
        raise


def _warn_of_unknown_gpus(client: Client, silent: Sequence[str]) -> None:
    if silent:
        names = worker_names(client)
        echo_error(
            "leasehold: warning: these workers have not reported since the coordinator started, so their "
            f"GPUs are unknown: {', '.join(names.get(one, one) for one in silent)}"
        )


def known_checkpoints(client: Client, workload: str = "", filter_text: str = "") -> list[Checkpoint]:
    """The known checkpoints. Warns about those that are unknown, which does not mean that there are none.

    Args:
        client: The client.
        workload: Only checkpoints of the workload with this id or name. Empty: all.
        filter_text: Which checkpoints, as for :meth:`Client.list_checkpoints`.
    """
    listed = client.list_checkpoints(workload=workload, filter=filter_text)
    if listed.unreachable:
        silent = ", ".join(worker_names(client).get(one, one) for one in listed.unreachable)
        echo_error(
            f"leasehold: warning: these workers did not answer, so their checkpoints are unknown: {silent}"
        )
    if listed.truncated:
        remedy = "" if workload else ": `leasehold get checkpoints WORKLOAD` lists those of one workload"
        echo_error(f"leasehold: warning: there are too many checkpoints, and the oldest are unknown{remedy}")
    return list(listed.checkpoints)


def worker_names(client: Client) -> Mapping[str, str]:
    """Names of workers by id."""
    return {worker.worker_id: worker.name for worker in client.workers()}


def with_short_names(client: Client, text: str) -> str:
    """Replaces the UUIDs of known GPUs, and the ids of their holders, in a text of a daemon by names."""
    from leasehold_client.arguments.gpu_names import with_places

    return with_places(text, places_in(client, [text]))


def places_in(client: Client, texts: Iterable[str]) -> dict[str, str]:
    """Short names of the GPUs in texts, and of their holders. Empty if no text has a UUID or an id."""
    from leasehold_client.arguments.gpu_names import gpu_places, has_ids

    return gpu_places(gpus_if_known(client)) if any(map(has_ids, texts)) else {}


@final
class ShortNames:
    """Short names of GPUs and their holders, for the texts of a stream.

    They are looked up again for an unknown id, every 10 s at most.

    Args:
        client: The client.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._places: dict[str, str] = {}
        self._next_s = 0.0

    def replaced(self, text: str) -> str:
        """The text with names in the place of known ids."""
        from leasehold_client.arguments.gpu_names import has_ids, with_places

        shown = with_places(text, self._places)
        if has_ids(shown) and time.monotonic() >= self._next_s:
            self._places = places_in(self._client, [text])
            self._next_s = time.monotonic() + LOOKUP_INTERVAL_S
            shown = with_places(text, self._places)
        return shown


def gpus_if_known(client: Client) -> list[FleetGpu]:
    """The GPUs, for their short names. Empty if the coordinator does not answer any more."""
    try:
        return client.gpus()
    except LeaseholdError:
        return []


def preempted_if_known(client: Client, ids: list[str]) -> list[str]:
    """Names of the workloads that a command suspended first. Ids, if the coordinator does not answer."""
    try:
        return [client.workload(workload_id).name for workload_id in ids]
    except LeaseholdError:
        return ids


def names_if_several(client: Client, plan: Plan) -> dict[str, str]:
    """Names of workloads by id. Empty for a plan of one workload, or without an answer of the coordinator."""
    ids = {member.workload_id for member in plan.members} | {check.workload_id for check in plan.checks}
    if len(ids - {""}) < 2:
        return {}
    try:
        return {workload.workload_id: workload.name for workload in client.workloads()}
    except LeaseholdError:
        return {}
