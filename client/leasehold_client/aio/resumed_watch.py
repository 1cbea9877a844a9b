"""A watch of many entries that survives outages of the coordinator."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

from leasehold.v1.watch_pb2 import Bookmark

from leasehold_client.aio.retry import resume
from leasehold_client.errors import LeaseholdError


class _WatchResponse(Protocol):
    @property
    def resume_token(self) -> str: ...

    @property
    def bookmark(self) -> Bookmark: ...


Response = TypeVar("Response", bound=_WatchResponse)


async def resumed_watch(
    open_stream: Callable[[str], AsyncGenerator[Response]], resume_token: str = ""
) -> AsyncGenerator[Response]:
    """Yields the responses of a watch without end. A broken watch is resumed from its last token.

    An outage of the coordinator is tolerated for 30 s.

    Args:
        open_stream: Opens the watch at a token. An empty token begins with a snapshot.
        resume_token: The first token.

    Raises:
        LeaseholdError: INVALID_TOKEN: changes were missed, or the watch broke within its snapshot. The
            caller must start again from a snapshot.
        NoCoordinatorError: The outage lasted longer.
    """
    token = resume_token
    has_begun = False

    async def attempt() -> AsyncGenerator[Response]:
        nonlocal token, has_begun
        if has_begun and not token:
            raise LeaseholdError(
                "the watch broke within its snapshot, so deletions may be missing: start again",
                "INVALID_TOKEN",
            )
        async with aclosing(open_stream(token)) as stream:
            async for response in stream:
                has_begun = True
                token = response.resume_token or token
                yield response

    async with aclosing(resume(attempt)) as responses:
        async for response in responses:
            yield response
