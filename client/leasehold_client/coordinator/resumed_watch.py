"""A watch of many entries that survives outages of the coordinator."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Protocol, TypeVar

from leasehold.v1.watch_pb2 import Bookmark

from leasehold_client.coordinator.retry import resume


class _WatchResponse(Protocol):
    @property
    def resume_token(self) -> str: ...

    @property
    def bookmark(self) -> Bookmark: ...


Response = TypeVar("Response", bound=_WatchResponse)


def resumed_watch(
    open_stream: Callable[[str], Generator[Response]], resume_token: str = ""
) -> Iterator[Response]:
    """Yields the responses of a watch without end. A broken watch is resumed from its last token.

    An outage of the coordinator is tolerated for 30 s.

    Args:
        open_stream: Opens the watch at a token. An empty token begins with a snapshot.
        resume_token: The first token.

    Raises:
        LeaseholdError: INVALID_TOKEN: changes were missed, so the caller must start again from a snapshot.
        NoCoordinatorError: The outage lasted longer.
    """
    token = resume_token

    def attempt() -> Iterator[Response]:
        nonlocal token
        with closing(open_stream(token)) as stream:
            for response in stream:
                token = response.resume_token or token
                yield response

    yield from resume(attempt)
