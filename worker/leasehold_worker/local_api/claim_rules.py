"""The rules for the fields of a claim."""

import re
from collections.abc import Sequence
from typing import Final

from google.protobuf import duration_pb2
from leasehold.v1 import errors_pb2, eviction_pb2, hook_pb2, workload_pb2

from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.hooks.validation import check_foreign_hooks, check_hooks
from leasehold_worker.host.peers import Peer

HOOKS_LIMIT_BYTES: Final = 65_536
"""Size of a claim's hooks: every report of its workload includes them."""

WAIT_LIMIT_S: Final = 366 * 24 * 3600

GRACE_LIMIT_S: Final = 7 * 24 * 3600

SIGNAL_LIMIT: Final = 64
"""The last signal of Linux (signal(7))."""

TEXT_LIMIT: Final = 128
"""Characters of the name or the UUID of a GPU."""

UNITS_LIMIT: Final = 64
"""Number of unit values that a claim may accept."""

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")


def check_duration(field: str, duration: duration_pb2.Duration, limit_s: int) -> None:
    """Refuses a duration out of range.

    Raises:
        OperationError: INVALID_ARGUMENT.
    """
    if not 0 <= duration.ToNanoseconds() <= limit_s * 10**9:
        raise invalid(
            field,
            f"{field.rpartition('.')[2]} of {duration.ToNanoseconds() / 1000000000.0:g} s is "
            f"out of range: give 0 to {limit_s} s",
        )


def check_claim_hooks(hooks: Sequence[hook_pb2.Hook], peer: Peer) -> None:
    """Refuses hooks that are too large, invalid, or permitted only for root and the worker's user.

    Raises:
        OperationError: INVALID_ARGUMENT.
    """
    size = sum(hook.ByteSize() for hook in hooks)
    if size > HOOKS_LIMIT_BYTES:
        raise invalid(
            "spec.hooks",
            f"the hooks have {size} bytes, and the limit is {HOOKS_LIMIT_BYTES}: move some of "
            "them into files",
        )
    check_hooks(hooks)
    if not peer.is_trusted:
        check_foreign_hooks(hooks)


def check_priority(spec: workload_pb2.WorkloadSpec, peer: Peer, limit: int) -> None:
    """Refuses a user a priority that would overtake the claims of everybody else.

    Raises:
        OperationError: NOT_PERMITTED.
    """
    if spec.priority > limit and not peer.is_trusted:
        raise OperationError(
            errors_pb2.ERROR_REASON_NOT_PERMITTED,
            f"priority {spec.priority} is above {limit}, the limit of users at this worker: give {limit} at "
            "most, or see user_priority_limit in the worker's settings",
            {"field": "spec.priority"},
        )


def check_helper(helper: workload_pb2.HelperTerms) -> None:
    """Refuses invalid terms of a preemptible workload.

    Raises:
        OperationError: INVALID_ARGUMENT.
    """
    if helper.HasField("grace"):
        check_duration("spec.helper.grace", helper.grace, GRACE_LIMIT_S)
    if helper.process_strategy not in (
        eviction_pb2.PROCESS_STRATEGY_UNSPECIFIED,
        eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
        eviction_pb2.PROCESS_STRATEGY_STOP,
    ):
        raise invalid(
            "spec.helper.process_strategy",
            "a preemptible workload is suspended or stopped: choose cuda_suspend or stop",
        )
    if helper.HasField("signal_number") and not 0 < helper.signal_number <= SIGNAL_LIMIT:
        raise invalid(
            "spec.helper.signal_number",
            f"invalid signal {helper.signal_number}: give a number of Linux, 1 to {SIGNAL_LIMIT}",
        )


def check_sizes(spec: workload_pb2.WorkloadSpec, gpus: int) -> None:
    """Refuses fields that would make lists and reports of workloads too long to send."""
    resources = spec.resources
    for field, what, size, limit in (
        ("spec.resources.gpu_uuids", "GPUs", len(resources.gpu_uuids), gpus),
        ("spec.resources.gpu_name", "characters", len(resources.gpu_name), TEXT_LIMIT),
        (
            "spec.resources.gpu_uuids",
            "characters in one",
            max(map(len, resources.gpu_uuids), default=0),
            TEXT_LIMIT,
        ),
        (
            "spec.resources.acceptable_gpu_units",
            "numbers",
            len(resources.acceptable_gpu_units),
            UNITS_LIMIT,
        ),
    ):
        if size > limit:
            raise invalid(field, f"{field} has {size} {what}, and the limit is {limit}: give less")
