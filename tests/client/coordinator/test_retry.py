"""Streams that break, without a wire."""

import time
from collections.abc import Generator

import pytest
from leasehold_client.coordinator import retry
from leasehold_client.coordinator.retry import resume
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, RenewalDueError

pytestmark = pytest.mark.usefixtures("short_outages")


def raising(error: LeaseholdError) -> list[str]:
    raise error


def test_a_stream_that_ends_has_ended() -> None:
    def stream() -> Generator[str]:
        yield from "ab"

    assert list(resume(stream)) == ["a", "b"]


def test_other_errors_are_raised_at_once() -> None:
    opened = []

    def refused() -> Generator[str]:
        opened.append(1)
        yield from raising(LeaseholdError("no such thing", "UNKNOWN_WORKLOAD"))

    with pytest.raises(LeaseholdError, match="no such thing"):
        list(resume(refused))
    assert len(opened) == 1


def refusal() -> LeaseholdError:
    """The refusal of a further stream of a caller."""
    return LeaseholdError(
        "user/carol has 64 streams", "TOO_MANY_CALLS", {"bound": "caller_streams"}, retry_after_s=0.01
    )


def test_a_stream_beyond_the_bound_of_its_caller_is_refused_after_one_further_attempt() -> None:
    opened = []

    def refused() -> Generator[str]:
        opened.append(1)
        yield from raising(refusal())

    with pytest.raises(LeaseholdError, match="user/carol has 64 streams"):
        list(resume(refused))
    assert len(opened) == 2


def test_an_outage_before_is_no_attempt() -> None:
    errors = [refusal(), NoCoordinatorError("away")]

    def stream() -> Generator[str]:
        if errors:
            yield from raising(errors.pop())
        yield "a"

    assert list(resume(stream)) == ["a"]


def test_a_new_wait_waits_for_a_place() -> None:
    errors = [refusal() for _ in range(4)]

    def stream() -> Generator[str]:
        if errors:
            yield from raising(errors.pop())
        yield "a"

    assert list(resume(stream, is_patient=True)) == ["a"]


def test_a_stream_is_opened_in_the_place_of_one_that_has_just_ended() -> None:
    errors = [refusal()]

    def stream() -> Generator[str]:
        if errors:
            yield from raising(errors.pop())
        yield "a"

    assert list(resume(stream)) == ["a"]


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_stream_that_was_open_waits_for_a_place(monkeypatch: pytest.MonkeyPatch, *, is_quiet: bool) -> None:
    monkeypatch.setattr(retry, "CONNECT_TIMEOUT_S", 0.02)
    broken: list[LeaseholdError] = [NoCoordinatorError("away"), *(refusal() for _ in range(4))]

    def stream() -> Generator[str]:
        if len(broken) == 5:
            if is_quiet:
                time.sleep(0.05)  # longer than a connection takes to make
            else:
                yield "a"
        if broken:
            yield from raising(broken.pop(0))
        yield "b"

    assert list(resume(stream)) == (["b"] if is_quiet else ["a", "b"])


def test_an_outage_ends_at_its_limit() -> None:
    def away() -> Generator[str]:
        yield from raising(NoCoordinatorError("away"))

    with pytest.raises(NoCoordinatorError):
        list(resume(away))


def test_an_answer_begins_the_limit_anew() -> None:
    attempts = iter(range(100))

    def flaky() -> Generator[int]:
        number = next(attempts)
        if number < 3:
            time.sleep(0.2)  # three outages, together longer than the limit
            yield number
            raise NoCoordinatorError("away")

    assert list(resume(flaky)) == [0, 1, 2]


def test_a_stream_that_was_long_quiet_has_the_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "CONNECT_TIMEOUT_S", 0.05)
    attempts = iter(range(100))

    def quiet() -> Generator[int]:
        number = next(attempts)
        if number < 4:
            time.sleep(0.15)  # longer than a connection takes to make, and never an answer
            raise NoCoordinatorError("away")
        yield number

    assert list(resume(quiet)) == [4]


@pytest.mark.parametrize("sent", [[False, False], [True, False], [False, True]])
def test_one_attempt_that_was_sent_counts_for_all(sent: list[bool]) -> None:
    attempts = iter(sent)

    def call() -> str:
        raise NoCoordinatorError("away", is_sent=next(attempts, sent[-1]))

    with pytest.raises(NoCoordinatorError) as last:
        retry.repeat(call)
    assert last.value.is_sent is any(sent)


def test_a_stream_whose_certificate_is_due_is_opened_again_also_if_it_may_not_be() -> None:
    errors = [RenewalDueError("due", retry_after_s=0.0)]

    def stream() -> Generator[str]:
        if errors:
            yield from raising(errors.pop())
        yield "a"

    assert list(resume(stream, may_reopen=lambda error: False)) == ["a"]
