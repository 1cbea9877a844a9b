"""A stream ends in time for a renewal, and a deadline of the caller stays one."""

import time

import grpc
import pytest
from leasehold_client.contexts import Context
from leasehold_client.coordinator.renewing_channel import RenewedContext
from leasehold_client.coordinator.retry import is_transient
from leasehold_client.coordinator.stream_limit import StreamLimit
from leasehold_client.errors import NoCoordinatorError


@pytest.fixture
def context() -> Context:
    """A context whose certificate expires in 1000 s."""
    return Context("alice", "user/alice", certificate="a", expire_s=time.time() + 1000)


def late() -> NoCoordinatorError:
    """The error of a call that reached its deadline."""
    return NoCoordinatorError("it did not respond in time", code=grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.mark.parametrize("timeout_s", [None, 501.0])
def test_a_stream_ends_halfway_to_the_expiry_and_may_be_reopened(
    context: Context, timeout_s: float | None
) -> None:
    limit = StreamLimit(RenewedContext(context), context, timeout_s)
    assert limit.timeout_s == pytest.approx(500, abs=1)
    found = limit.error(late())
    assert is_transient(found)
    assert not isinstance(found, NoCoordinatorError), "a wait would time out"


def test_an_earlier_deadline_of_the_caller_stays_one(context: Context) -> None:
    limit = StreamLimit(RenewedContext(context), context, 400.0)
    error = late()
    assert limit.timeout_s == 400.0
    assert limit.error(error) is error


def test_a_client_without_a_context_has_only_the_deadline_of_the_caller() -> None:
    assert StreamLimit(None, None, None).timeout_s is None
    assert StreamLimit(None, None, 3.0).timeout_s == 3.0
