"""Rules for sizes, names and times in a worker's frames, independent of the fleet's state. Pure."""

import re
from typing import Final

from google.protobuf.message import Message
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.core.field_rules import GPU_LIMIT
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.message_values import find_problem
from leasehold_coordinator.timestamps import is_storable

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""The form of a worker's name, which appears in `worker/slot`, in tables and in logs."""

ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
"""The form of an id made by a worker: of itself, its instance, its GPUs or its workloads."""

WORKLOAD_LIMIT: Final = 2_048
"""Most workloads in one hello: the unfinished ones, and 256 that have ended."""

USER_LIMIT: Final = 256
"""Most characters of a user's name."""

GENERATION_LIMIT: Final = 2**62
"""The first invalid generation. The coordinator adds to a reported generation, which must not overflow."""

DESCRIPTION_LIMIT_BYTES: Final = 32_768
"""Most bytes of a hello without its leases, workloads and commands. Memory and store keep these bytes."""

VOLATILE: Final = ("gpu_leases", "workloads", "commands_in_flight", "commands_unacknowledged")
"""Fields of a hello that are true of one moment. The coordinator keeps them elsewhere."""


def description(hello: Hello) -> Hello:
    """A hello without its VOLATILE fields."""
    kept = Hello()
    kept.CopyFrom(hello)
    for field in VOLATILE:
        kept.ClearField(field)
    return Hello.FromString(kept.SerializeToString())  # parsed anew, which frees the cleared fields


def check_workload(reported: Workload) -> None:
    """Refuses a report of a workload that can't be stored or shown.

    Raises:
        FleetError: PROTOCOL_VIOLATION, which names the field.
    """
    check_id("workload_id", reported.workload_id)
    if reported.name and not NAME.fullmatch(reported.name):
        raise _violation("name", f"invalid name {reported.name[:64]!r} of workload {reported.workload_id}")
    if len(reported.user) > USER_LIMIT:
        raise _violation("user", f"the user of workload {reported.workload_id} has too many characters")
    if reported.status.generation >= GENERATION_LIMIT:
        raise _violation(
            "generation", f"workload {reported.workload_id} has an impossible generation: send the real one"
        )
    for moment in (reported.status.start_time, reported.create_time):
        if not is_storable(moment):
            raise _violation(
                "start_time",
                f"workload {reported.workload_id} has an impossible start time: send the real one",
            )


def check_hello(hello: Hello) -> None:
    """Refuses a hello with missing, duplicate or too large values.

    Raises:
        FleetError: PROTOCOL_VIOLATION, which names the field.
    """
    check_id("worker_id", hello.worker_id)
    check_id("instance_id", hello.instance_id)
    check_name(hello.name)
    kept_bytes = description(hello).ByteSize()
    if kept_bytes > DESCRIPTION_LIMIT_BYTES:
        raise _violation(
            "labels",
            f"labels, capabilities and GPUs of worker {hello.name} take {kept_bytes} of at most "
            f"{DESCRIPTION_LIMIT_BYTES} bytes: give the worker fewer or shorter labels",
        )
    if len(hello.gpus) > GPU_LIMIT:
        raise _violation("gpus", f"{len(hello.gpus)} GPUs are too many: send at most {GPU_LIMIT}")
    if len(hello.workloads) > WORKLOAD_LIMIT:
        raise _violation(
            "workloads",
            f"{len(hello.workloads)} workloads are too many for one worker: send at most {WORKLOAD_LIMIT}",
        )
    for gpu in hello.gpus:
        check_id("gpus.uuid", gpu.uuid)
    for workload in hello.workloads:
        check_workload(workload)
    for field, values in (
        ("gpus.uuid", [gpu.uuid for gpu in hello.gpus]),
        ("gpus.slot", [gpu.slot for gpu in hello.gpus]),
        ("workloads.workload_id", [workload.workload_id for workload in hello.workloads]),
    ):
        if len(set(values)) < len(values):
            raise _violation(field, f"hello of worker {hello.name} has the same {field} twice")


def check_name(name: str) -> None:
    """Refuses an invalid name of a worker.

    Raises:
        FleetError: PROTOCOL_VIOLATION.
    """
    if not NAME.fullmatch(name):
        raise _violation(
            "name",
            f"invalid worker name {name[:64]!r}: use 1 to 64 letters, digits, '-', '_' or '.', "
            "and start with a letter or digit (`leasehold worker --name`)",
        )


def check_values(message: Message) -> None:
    """Refuses a message with a negative number or a time out of range.

    Raises:
        FleetError: PROTOCOL_VIOLATION, which names the field.
    """
    if problem := find_problem(message):
        raise _violation(problem.path, f"invalid {problem.path}: {problem.text}")


def check_id(field: str, value: str) -> None:
    """Refuses an id that is empty, too long, or has an invalid character.

    Raises:
        FleetError: PROTOCOL_VIOLATION.
    """
    if not ID.fullmatch(value):
        raise _violation(
            field,
            f"invalid {field} {value[:64]!r}: use 1 to 128 letters, digits, '-', '_', '.' or ':', "
            "and start with a letter or digit",
        )


def _violation(field: str, message: str) -> FleetError:
    return FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, message, field=field)
