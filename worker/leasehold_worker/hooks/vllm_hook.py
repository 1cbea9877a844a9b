"""The vllm hook: sleep and wake_up of a vLLM server, and its communicators.

The routes are those of vLLM's ``entrypoints/serve/{sleep,rpc,cache,rlhf}/api_router.py`` and of its page
``docs/features/sleep_mode.md``; a server has them with VLLM_SERVER_DEV_MODE=1 and ``--enable-sleep-mode``:

* ``POST /pause?mode=wait``: 200 once no request is in flight. New requests wait. ``POST /resume`` takes the
  pause back at any time. Servers before ``mode`` read ``wait_for_inflight_requests=true`` instead. Servers
  before 0.12 have neither route.
* ``POST /sleep?level=1|2&mode=abort|wait|keep``: 200 without a body. Level 1 moves weights to host memory,
  level 2 drops them; both drop the KV cache. ``abort``, the default, ends what is in flight, so ``wait`` is
  asked for. Older servers don't know ``mode`` and ignore it. Nothing takes back a sleep that waits for
  requests: the server sleeps once it is idle. So the server is always paused before its sleep.
* ``GET /is_sleeping``: ``{"is_sleeping": bool}``. True until all tags are awake, and while scheduling is
  paused.
* ``POST /wake_up?tags=weights&tags=kv_cache``: 200. Waking what is awake does nothing.
* ``POST /collective_rpc`` with ``{"method": …}``: every worker runs that method. After level 2 it must be
  ``reload_weights``, or the server answers with garbage and says nothing (vllm issues 21336, 29341).
* ``POST /reset_prefix_cache``: 200, newer ones with ``{"success": bool}``.

All of them may be called again without harm. The methods of communicators must allow the same: the way back
does not know how far the way down went. ``/resume`` alone is not safe on a server that sleeps: requests would
run without memory. So the record notes a sleep before it is asked for.
"""

import json
import random
from typing import Final

import trio
from leasehold.v1 import eviction_pb2
from leasehold.v1.eviction_pb2 import WeightStrategy

from leasehold_worker.hooks.context import HookFailedError, Turn
from leasehold_worker.hooks.credentials import read_token
from leasehold_worker.hooks.http_call import HttpAnswer, HttpCallError, call

ATTEMPTS: Final = 3
"""Attempts of a call without an answer or with a status of 5xx."""

BACKOFF_S: Final = 0.2
"""Wait before the second attempt, doubled before the third, with up to half as long added."""

LOOK_INTERVAL_S: Final = 0.2
"""Interval of queries whether a server sleeps. Its routes may answer before it sleeps or wakes."""

AWAKE_DEADLINE_S: Final = 10.0
"""Time for which a server may report that it sleeps after it was woken."""

LEVELS: Final[dict[WeightStrategy.ValueType, int]] = {
    eviction_pb2.WEIGHT_STRATEGY_OFFLOAD: 1,
    eviction_pb2.WEIGHT_STRATEGY_DISCARD: 2,
}
"""The sleep level of each weight strategy; with any other a server does not sleep."""

_PAUSE: Final = "/pause?mode=wait&wait_for_inflight_requests=true"
_WEIGHTS: Final = "weights"
_CACHE: Final = "kv_cache"


async def down(turn: Turn) -> None:
    """Pauses the server, puts it to sleep by the weight strategy, then drops its communicators.

    Raises:
        HookFailedError: A step failed. The server is in an intermediate state, and :func:`up` wakes it.
    """
    level = LEVELS.get(turn.context.weight_strategy)
    if level is not None:
        await _control(turn, "POST", _PAUSE, optional=True)
        await turn.context.record.add(_sleep_note(turn))
        await _control(turn, "POST", f"/sleep?level={level}&mode=wait")
        while not await _is_sleeping(turn):
            turn.doing = "the server answered /sleep, but /is_sleeping is still false"
            await trio.sleep(LOOK_INTERVAL_S)
    if turn.hook.vllm.suspend_method:
        await _remote_call(turn, turn.hook.vllm.suspend_method)


async def up(turn: Turn) -> None:
    """Creates the communicators again, wakes the server, loads dropped weights, and resets its prefix cache.

    A server that does not sleep is not woken. A paused server is resumed. A prefix cache that is not reset
    becomes a warning.

    Raises:
        HookFailedError: A step failed.
    """
    hook = turn.hook.vllm
    if hook.resume_method:
        await _remote_call(turn, hook.resume_method)
    if turn.context.weight_strategy not in LEVELS:
        return
    note = _sleep_note(turn)
    woken = turn.context.record.holds(note) and await _is_sleeping(turn)
    if woken:
        await _wake(turn)
        await _require_awake(turn)
    await _control(turn, "POST", "/resume", optional=True)
    if woken:
        await _reset_prefix_cache(turn)
    await turn.context.record.remove(note)


def _sleep_note(turn: Turn) -> str:
    """The note that is made before the server is told to sleep."""
    return f"{turn.hook.name}/sleep"


async def _wake(turn: Turn) -> None:
    tags = tuple(turn.hook.vllm.wake_tags)
    if turn.context.weight_strategy == eviction_pb2.WEIGHT_STRATEGY_DISCARD:
        # The weights are loaded while the rest still sleeps. So a server that is awake has its weights, also
        # if an earlier wake was interrupted.
        await _control(turn, "POST", f"/wake_up?tags={_WEIGHTS}")
        await _remote_call(turn, "reload_weights")
        tags = tuple(tag for tag in tags or (_CACHE,) if tag != _WEIGHTS)
    elif not tags:
        await _control(turn, "POST", "/wake_up")
    for tag in tags:
        await _control(turn, "POST", f"/wake_up?tags={tag}")


async def _require_awake(turn: Turn) -> None:
    with trio.move_on_after(AWAKE_DEADLINE_S):
        while True:
            if not await _is_sleeping(turn):
                return
            await trio.sleep(LOOK_INTERVAL_S)
    raise HookFailedError(
        f"{turn.hook.vllm.url} was woken, but reports after {AWAKE_DEADLINE_S:g} s that it "
        "still sleeps: wake all of its tags"
    )


async def _reset_prefix_cache(turn: Turn) -> None:
    try:
        answer = await _control(turn, "POST", "/reset_prefix_cache")
        is_reset = answer.field("success") is not False
    except HookFailedError as error:
        turn.warnings.append(f"hook {turn.hook.name}: the prefix cache was not reset: {error}")
        return
    if not is_reset:
        turn.warnings.append(
            f"hook {turn.hook.name}: the server did not reset its prefix cache: it was in use"
        )


async def _is_sleeping(turn: Turn) -> bool:
    answer = await _control(turn, "GET", "/is_sleeping")
    is_sleeping = answer.field("is_sleeping")
    if not isinstance(is_sleeping, bool):
        raise HookFailedError(
            f"GET /is_sleeping of {turn.hook.vllm.url} answered {answer}, without "
            "is_sleeping: check that a vLLM server listens there"
        )
    return is_sleeping


async def _remote_call(turn: Turn, method: str) -> None:
    await _control(turn, "POST", "/collective_rpc", json.dumps({"method": method}).encode())


async def _control(
    turn: Turn, method: str, path: str, body: bytes | None = None, *, optional: bool = False
) -> HttpAnswer:
    """Makes a call, with a few attempts. An optional route may be missing: older servers answer 404."""
    url = turn.hook.vllm.url.rstrip("/") + path
    what = f"{method} {url}" + (f" with {body.decode()}" if body else "")
    for attempt in range(1, ATTEMPTS + 1):
        turn.doing = f"{what} did not answer"
        try:
            token = await read_token(
                turn.hook.vllm.credential, turn.context.environment, turn.context.account
            )
            answer = await call(method, url, body, token=token, account=turn.context.account)
        except HttpCallError as error:
            failure = HookFailedError(f"{what} got no answer ({error}): check that the server runs")
        else:
            if answer.good or (optional and answer.status == 404):
                return answer
            remedy = ": start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
            failure = HookFailedError(f"{what} answered {answer}{remedy if answer.status == 404 else ''}")
            if answer.status < 500:
                break
        if attempt < ATTEMPTS:
            turn.doing = str(failure)
            await trio.sleep(BACKOFF_S * attempt * random.uniform(1.0, 1.5))
    raise failure
