"""A broken watch goes on at its last token, and never begins a second snapshot by itself."""

from collections.abc import Generator

import pytest
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.watch_pb2 import Bookmark
from leasehold.v1.worker_pb2 import Worker
from leasehold_client.coordinator import retry
from leasehold_client.coordinator.resumed_watch import resumed_watch
from leasehold_client.errors import LeaseholdError, NoCoordinatorError

ALPHA = WatchFleetResponse(worker=Worker(name="alpha"))
END = WatchFleetResponse(bookmark=Bookmark(snapshot_end=True), resume_token="1")
BETA = WatchFleetResponse(worker=Worker(name="beta"), resume_token="2")


class Streams:
    """Streams that yield these responses and break. The last one ends."""

    def __init__(self, *streams: list[WatchFleetResponse]) -> None:
        self.tokens: list[str] = []
        self._streams = list(streams)

    def open(self, token: str) -> Generator[WatchFleetResponse]:
        self.tokens.append(token)
        yield from self._streams.pop(0)
        if self._streams:
            raise NoCoordinatorError("the coordinator restarts")


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_INTERVAL_S", 0.01)


def test_a_watch_that_breaks_within_its_snapshot_says_so() -> None:
    streams = Streams([ALPHA], [END])
    watch = resumed_watch(streams.open)
    assert next(watch) == ALPHA
    with pytest.raises(LeaseholdError, match="broke within its snapshot") as error:
        next(watch)
    assert error.value.reason == "INVALID_TOKEN"
    assert streams.tokens == [""]


def test_a_watch_that_breaks_elsewhere_goes_on() -> None:
    streams = Streams([], [ALPHA, END], [], [BETA])
    assert list(resumed_watch(streams.open)) == [ALPHA, END, BETA]
    assert streams.tokens == ["", "", "1", "1"]
