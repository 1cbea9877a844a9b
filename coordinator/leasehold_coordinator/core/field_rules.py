"""Rules for values of single fields, in any message. Pure."""

from collections.abc import Sized
from typing import Final

from google.protobuf import duration_pb2

from leasehold_coordinator.errors import invalid

TIME_LIMIT_S: Final = 7 * 86_400
"""One week. The longest timeout of a command, and of anything within a command."""

TEXT_LIMIT: Final = 256
"""Most characters of a cordon's reason, of its author's name, and of the reason of a GPU's bad health."""

GPU_LIMIT: Final = 256
"""Most GPUs of one worker, and most entries of a list that names or describes GPUs."""


def check_duration(field: str, duration: duration_pb2.Duration, *, may_be_zero: bool = False) -> None:
    """Refuses a duration that is not above 0, is above a week, or has no JSON form.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if not (duration.seconds >= 0 and 0 <= duration.nanos < 10**9):
        raise invalid(
            field,
            f"a {_name(field)} of {duration.seconds} s and {duration.nanos} ns is out of range: give "
            "at least 0 s, and 0 to 999999999 ns",
        )
    least_ns = 0 if may_be_zero else 1
    if not least_ns <= duration.ToNanoseconds() <= TIME_LIMIT_S * 10**9:
        raise invalid(
            field,
            f"a {_name(field)} of {duration.ToNanoseconds() / 1e9:g} s is out of range: "
            f"give {'0' if may_be_zero else 'more than 0'} and at most {TIME_LIMIT_S} s",
        )


def check_text(field: str, text: str, remedy: str) -> None:
    """Refuses a text that is empty, or longer than 256 characters.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if not text.strip():
        raise invalid(field, f"the {_name(field)} is empty: {remedy}")
    if len(text) > TEXT_LIMIT:
        raise invalid(field, f"a {_name(field)} has {len(text)} characters: give at most {TEXT_LIMIT}")


def check_gpu_list(field: str, entries: Sized) -> None:
    """Refuses a list about GPUs with too many entries: the planner searches it for each GPU of the fleet.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if len(entries) > GPU_LIMIT:
        raise invalid(field, f"{len(entries)} {_name(field)} are too many: give at most {GPU_LIMIT}")


def _name(field: str) -> str:
    return field.rpartition(".")[2]
