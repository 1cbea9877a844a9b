"""Values that a request can't hold, and arguments that no method has."""

from collections import UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.command_service_pb2 import GetCommandRequest
from leasehold.v1.operation_pb2 import RestoreOperation
from leasehold.v1.workload_pb2 import Resources, Workload
from leasehold.v1.workload_service_pb2 import ReadWorkloadOutputRequest, RestoreWorkloadRequest
from leasehold_client.errors import UsageError
from leasehold_client.request_fields import build, value_text

SURROGATE = "\ud800"


def test_a_message_is_built_from_its_fields() -> None:
    built = build(Workload, name="one", labels={"team": "vision"})
    assert built == Workload(name="one", labels={"team": "vision"})


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_a_number_out_of_range_is_told_with_the_range(value: int) -> None:
    with pytest.raises(UsageError) as raised:
        build(ReadWorkloadOutputRequest, offset=value)
    assert raised.value.message == (
        f"invalid offset {value}: out of range; "
        "give a number from -9223372036854775808 to 9223372036854775807"
    )


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31)])
def test_the_ends_of_a_range_are_in_the_range(value: int) -> None:
    assert build(Resources, gpu_count=value).gpu_count == value


def test_a_number_too_long_for_a_message_is_told_by_its_bits() -> None:
    with pytest.raises(UsageError, match="invalid gpu_count <16610 bits>: out of range"):
        build(Resources, gpu_count=10**5000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build(GetCommandRequest, command_id=SURROGATE),
            r"invalid command_id '\ud800': not valid UTF-8",
        ),
        (lambda: build(Workload, labels={SURROGATE: "x"}), r"invalid labels '\ud800': not valid UTF-8"),
        (lambda: build(Workload, labels={"x": SURROGATE}), r"invalid labels '\ud800': not valid UTF-8"),
    ],
    ids=["text", "key", "value"],
)
def test_a_text_with_a_surrogate_is_told_escaped(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()
    assert raised.value.message.startswith(message)
    assert raised.value.message.endswith("give a text without surrogates (U+D800 to U+DFFF)")


@pytest.mark.parametrize("kind", [list, tuple, deque, UserList, set, dict.fromkeys, iter])
def test_the_bad_text_of_an_iterable_is_told(kind: Callable[[list[str]], Any]) -> None:
    with pytest.raises(UsageError, match=r"invalid preempt '\\ud800'"):
        build(RestoreOperation, preempt=kind(["one", SURROGATE]))


@pytest.mark.parametrize("kind", [list, tuple, deque, UserList, iter])
def test_an_iterable_fills_a_repeated_field(kind: Callable[[list[str]], Any]) -> None:
    built = build(RestoreOperation, preempt=kind(["one", "two"]))
    assert built == RestoreOperation(preempt=["one", "two"])


def test_a_long_text_is_cut() -> None:
    with pytest.raises(UsageError) as raised:
        build(GetCommandRequest, command_id="a" * 100_000 + SURROGATE)
    assert len(raised.value.message) < 200
    assert value_text("ä" * 10_000).startswith("'\\xe4")


def test_an_unknown_field_is_a_type_error() -> None:
    unknown: Any = build
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo' for RestoreWorkloadRequest"):
        unknown(RestoreWorkloadRequest, workload="one", foo=1)


def test_other_errors_are_unchanged() -> None:
    def failing() -> Iterator[str]:
        yield "one"
        raise ValueError("of the caller")

    make: Any = build
    with pytest.raises(ValueError, match="of the caller"):
        make(RestoreOperation, gpu_uuids=failing())
    with pytest.raises(TypeError):
        make(GetCommandRequest, command_id=3)
    with pytest.raises(ValueError, match="unknown enum label"):
        make(RoleBinding, role="ROLE_KING")
