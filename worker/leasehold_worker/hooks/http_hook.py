"""The http hook, and the drain of running requests, which consists of three."""

from typing import Final
from urllib.parse import quote

import trio
from leasehold.v1 import hook_pb2

from leasehold_worker.hooks.context import HookFailedError, Turn
from leasehold_worker.hooks.credentials import read_token
from leasehold_worker.hooks.http_call import HttpCallError, call
from leasehold_worker.hooks.templates import expand

IDLE_INTERVAL_S: Final = 0.25
"""Interval of queries whether a server is idle."""


async def run(turn: Turn) -> None:
    """Makes the request of an http hook.

    Raises:
        HookFailedError: No answer came, or its status is not 2xx.
    """
    await _request(turn, turn.hook.http)


async def drain(turn: Turn) -> None:
    """Stops admission, then waits until the server is idle, within the deadline of the caller.

    Raises:
        HookFailedError: The server did not stop admission. It must still be told to admit requests again.
    """
    drain_of = turn.hook.drain
    if drain_of.HasField("stop_admitting"):
        await _request(turn, drain_of.stop_admitting)
    while True:
        try:
            await _request(turn, drain_of.idle)
        except HookFailedError as error:
            turn.doing = f"work was still in flight; {error}"
            await trio.sleep(IDLE_INTERVAL_S)
        else:
            return


async def admit_again(turn: Turn) -> None:
    """Makes a drained server admit requests again.

    Raises:
        HookFailedError: The server did not.
    """
    if turn.hook.drain.HasField("admit_again"):
        await _request(turn, turn.hook.drain.admit_again)


async def _request(turn: Turn, request: hook_pb2.HttpHook) -> None:
    values = turn.context.values(turn.phase)
    # A name in an address may not become a path or a query of its own.
    url = expand(request.url, values, lambda value: quote(value, safe=","))
    body = expand(request.body.decode(), values).encode() if request.body else None
    turn.doing = f"{request.method} {url} did not answer"
    try:
        token = await read_token(request.credential, turn.context.environment, turn.context.account)
        answer = await call(request.method, url, body, token=token, account=turn.context.account)
    except HttpCallError as error:
        raise HookFailedError(
            f"{request.method} {url} got no answer ({error}): check that the server runs"
        ) from error
    if not answer.good:
        raise HookFailedError(f"{request.method} {url} answered {answer}: see the server's log")
