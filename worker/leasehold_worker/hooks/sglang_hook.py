"""The sglang hook: release and resume of an SGLang server's memory occupation.

What its sources say (``srt/entrypoints/http_server.py``, ``srt/managers/scheduler_update_weights_mixin.py``)
and its issues report decides how it is called:

* ``POST /release_memory_occupation`` with ``{"tags": ["kv_cache", "weights"]}``: 200 with ``null``. A call
  during a request fails an assertion that **ends the scheduler** (pull request 24123). So the hook stops new
  requests by ``POST /pause_generation``, and repeats ``GET /flush_cache`` until the server is idle: 200, and
  400 before.
* ``POST /resume_memory_occupation`` with the same tags. A resume of a tag that is not released **ends the
  scheduler** too (a KeyError, ibid.), and so does a second release. No route reports what is released. So the
  hook records each call before it is made, with the memory then in use. If a recorded call may or may not
  have arrived, the hook sends another query. The scheduler answers queries in order, so NVML's figure then
  shows whether the call took effect. Neither call is ever repeated without this check.
* Released weights are restored only with ``--enable-weights-cpu-backup``. Without it the new memory has
  arbitrary content, and the server's answers are wrong (issues 6367, 19442). So offload requires that
  setting, and discard loads the weights by ``POST /update_weights_from_disk`` with ``{"model_path": …}``.
* Nothing is freed without ``--enable-memory-saver``.
* ``GET /get_server_info`` (newer: ``/server_info``) reports these settings, ``model_path`` and the state of
  the scheduler.
* ``POST /continue_generation`` admits requests again, and does nothing if the server is not paused. Servers
  older than pause_generation answer 404 to both. There a request at the wrong moment can still end the
  scheduler, unless the hook drains.
"""

import json
from typing import Final

import trio
from leasehold.v1 import eviction_pb2

from leasehold_worker.hooks.context import HookFailedError, Turn
from leasehold_worker.hooks.credentials import read_token
from leasehold_worker.hooks.http_call import MOST_ANSWER_BYTES, HttpAnswer, HttpCallError, call

IDLE_INTERVAL_S: Final = 0.2
"""Interval of queries whether requests are running."""

RELEASING: Final = "releasing="
"""Note with the hook's name and a slash, made before the release, with the bytes held then."""

RELEASED: Final = "released="
"""Note, as above, made once the release is certain."""

RESUMING: Final = "resuming"
"""Note, as above, made before the resumption."""

DROPPED: Final = "dropped"
"""Note, as above: weights were dropped and not loaded again."""

AWAKE_SHARE: Final = 0.98
"""Share of the bytes before a release. A server with more has not released its memory, or has resumed it."""

RELEASED_SHARE: Final = 0.9
"""Share of these bytes. A server with less has released its memory. Between the shares, the notes decide."""

_TAGS: Final = ("kv_cache", "weights")
_WEIGHTS: Final = "weights"


async def down(turn: Turn) -> None:
    """Waits until no request runs, and releases the memory unless the weights are retained.

    Raises:
        HookFailedError: The memory was not released, or that is unknown.
    """
    strategy = turn.context.weight_strategy
    if strategy not in (eviction_pb2.WEIGHT_STRATEGY_OFFLOAD, eviction_pb2.WEIGHT_STRATEGY_DISCARD):
        return
    if await _is_released(turn):
        return
    await _forget_release(turn)
    tags = _tags(turn)
    discards = strategy == eviction_pb2.WEIGHT_STRATEGY_DISCARD and _WEIGHTS in tags
    _require_settings(turn, await _server_info(turn), tags, discards)
    # Running requests may finish first. The pause then aborts requests that came in between.
    await _until_idle(turn)
    await _post_if_offered(turn, "/pause_generation", {"mode": "abort"})
    await _until_idle(turn)
    record = turn.context.record
    if discards:
        await record.add(_note(turn, DROPPED))
    held_bytes = await turn.context.measure()
    await record.add(_note(turn, f"{RELEASING}{held_bytes or ''}"))
    answer = await _post(turn, "/release_memory_occupation", {"tags": tags})
    if not answer.good:
        if answer.status < 500:  # refused before the scheduler saw it
            await _forget_release(turn)
            await record.remove(_note(turn, DROPPED))
        raise _refused(turn, "/release_memory_occupation", answer)
    await record.add(_note(turn, f"{RELEASED}{await turn.context.measure() or ''}"))


async def up(turn: Turn) -> None:
    """Resumes the memory, loads dropped weights, and admits requests again.

    Only noted releases are resumed.

    Raises:
        HookFailedError: A step failed, or it is unknown whether the memory was released.
    """
    strategy = turn.context.weight_strategy
    if strategy not in (eviction_pb2.WEIGHT_STRATEGY_OFFLOAD, eviction_pb2.WEIGHT_STRATEGY_DISCARD):
        return
    if await _is_released(turn):
        await turn.context.record.add(_note(turn, RESUMING))
        answer = await _post(turn, "/resume_memory_occupation", {"tags": _tags(turn)})
        if not answer.good:
            raise _refused(turn, "/resume_memory_occupation", answer)
    await _forget_release(turn)
    if strategy == eviction_pb2.WEIGHT_STRATEGY_DISCARD and _WEIGHTS in _tags(turn):
        await _load_weights(turn)
    await _post_if_offered(turn, "/continue_generation", {})


async def _is_released(turn: Turn) -> bool:
    """Whether the server has released its memory, according to the record or else to NVML.

    Raises:
        HookFailedError: Record and NVML do not decide, or the server does not answer.
    """
    record = turn.context.record
    before, after = _held(turn, RELEASING), _held(turn, RELEASED)
    if record.known and before is None:
        return False
    if record.known and after is not None and _held(turn, RESUMING) is None:
        return True
    await _server_info(turn)  # earlier requests have taken effect by now, or never will
    verdict = _by_memory(_bytes(before), _bytes(after), await turn.context.measure())
    if verdict is None:
        await _post_if_offered(turn, "/continue_generation", {})
        raise HookFailedError(
            "it is unknown whether the server had released its memory, and resuming a server "
            "that had not would end it: if it does not answer, POST "
            f"{_url(turn, '/resume_memory_occupation')} with {_json({'tags': _tags(turn)})}"
        )
    return verdict


def _by_memory(before: int | None, after: int | None, now: int | None) -> bool | None:
    """Whether memory is released, by the bytes before and after the release and now.

    None: these bytes leave it open.
    """
    if before is None or now is None:
        return None
    awake_at, released_at = AWAKE_SHARE * before, RELEASED_SHARE * before
    if after is not None:
        awake_at, released_at = max(awake_at, before - (before - after) / 4), after + (before - after) / 4
    if now >= awake_at > released_at:
        return False
    return True if now <= released_at < awake_at else None


def _bytes(held: str | None) -> int | None:
    return int(held) if held else None


async def _forget_release(turn: Turn) -> None:
    """Removes the notes of a release that was not made, or is undone.

    After a crash in between, the notes leave it open, and never claim a release.
    """
    record = turn.context.record
    for note in (RELEASED, RESUMING, RELEASING):
        if (held := _held(turn, note)) is not None:
            await record.remove(_note(turn, f"{note}{held}"))


def _held(turn: Turn, note: str) -> str | None:
    """The text after a note. None: there is no such note."""
    prefix = _note(turn, note)
    found = [held for held in turn.context.record.notes if held.startswith(prefix)]
    return found[0].removeprefix(prefix) if found else None


async def _load_weights(turn: Turn) -> None:
    record = turn.context.record
    if not record.holds(_note(turn, DROPPED)):
        return
    info = await _server_info(turn)
    answer = await _post(turn, "/update_weights_from_disk", {"model_path": _setting(info, "model_path")})
    if not answer.good or answer.field("success") is False:
        raise _refused(turn, "/update_weights_from_disk", answer)
    await record.remove(_note(turn, DROPPED))


async def _until_idle(turn: Turn) -> None:
    while True:
        answer = await _call(turn, "GET", "/flush_cache")
        if answer.good:
            return
        if answer.status != 400:
            raise _refused(turn, "/flush_cache", answer)
        turn.doing = f"requests were still under way at {turn.hook.sglang.url}: send it fewer, or drain it"
        await trio.sleep(IDLE_INTERVAL_S)


async def _server_info(turn: Turn) -> HttpAnswer:
    answer = await _call(turn, "GET", "/get_server_info")
    path = "/get_server_info"
    if answer.status == 404:
        path = "/server_info"
        answer = await _call(turn, "GET", path)
    if not answer.good:
        raise _refused(turn, path, answer)
    return answer


def _require_settings(turn: Turn, info: HttpAnswer, tags: list[str], discards: bool) -> None:
    url = turn.hook.sglang.url
    if _setting(info, "enable_memory_saver") is not True:
        raise HookFailedError(f"{url} runs without its memory saver: start it with --enable-memory-saver")
    if discards and not isinstance(_setting(info, "model_path"), str):
        raise HookFailedError(f"{url} reports no model_path, so its weights could not be loaded again")
    if not discards and _WEIGHTS in tags and _setting(info, "enable_weights_cpu_backup") is not True:
        raise HookFailedError(
            f"{url} would lose its weights: start it with --enable-weights-cpu-backup, or discard them"
        )


def _setting(info: HttpAnswer, name: str) -> bool | str | None:
    # The answer has the settings once more for each rank, and is queried a few times in an operation only.
    return info.field(name, MOST_ANSWER_BYTES)


async def _post_if_offered(turn: Turn, path: str, body: dict[str, str]) -> None:
    answer = await _post(turn, path, body)
    if not answer.good and answer.status != 404:
        raise _refused(turn, path, answer)


async def _post(turn: Turn, path: str, body: object) -> HttpAnswer:
    return await _call(turn, "POST", path, _json(body).encode())


async def _call(turn: Turn, method: str, path: str, body: bytes | None = None) -> HttpAnswer:
    turn.doing = f"{method} {_url(turn, path)} did not answer"
    try:
        token = await read_token(turn.hook.sglang.credential, turn.context.environment, turn.context.account)
        return await call(method, _url(turn, path), body, token=token, account=turn.context.account)
    except HttpCallError as error:
        raise HookFailedError(
            f"{method} {_url(turn, path)} got no answer ({error}): check that the server runs"
        ) from error


def _tags(turn: Turn) -> list[str]:
    return list(turn.hook.sglang.tags) or list(_TAGS)


def _note(turn: Turn, what: str) -> str:
    return f"{turn.hook.name}/{what}"


def _url(turn: Turn, path: str) -> str:
    return turn.hook.sglang.url.rstrip("/") + path


def _json(body: object) -> str:
    return json.dumps(body)


def _refused(turn: Turn, path: str, answer: HttpAnswer) -> HookFailedError:
    return HookFailedError(f"{_url(turn, path)} answered {answer}: see the server's log")
