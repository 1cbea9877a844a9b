"""The sglang hook where nobody saw what was done: a second release or resume would end the server."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import WeightStrategy
from leasehold.v1.hook_pb2 import Hook, SglangHook
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks import runner, sglang_hook
from leasehold_worker.hooks.context import HookContext, HookRecord
from leasehold_worker.hooks.http_call import HttpAnswer, HttpCallError, call
from leasehold_worker.host.accounts import Account

from tests.worker.framework_servers import serving
from tests.worker.hook_contexts import DISCARD, OFFLOAD, context
from tests.worker.sglang_server import SglangServer

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
EXPIRING_S = 3.0
"""Timeout of a hook that expires. The calls before the slow one need less on a busy machine."""


class Worker:
    """Notes on a disk, by a worker that dies at one of its writes: then it writes and calls nothing more.

    Args:
        dies_at: Number of that write.
        written: Whether that one is on disk.
    """

    def __init__(self, dies_at: int = 1000, *, written: bool = True) -> None:
        self.notes: frozenset[str] = frozenset()
        self.writes = 0
        self.dead = False
        self._dies_at = dies_at
        self._written = written

    async def save(self, notes: frozenset[str]) -> None:
        dies = self.writes == self._dies_at
        if not self.dead and (self._written or not dies):
            self.notes = notes
        self.writes += 1
        self.dead = self.dead or dies
        if self.dead:
            raise OperationError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "it is dead")

    async def call(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        token: str | None = None,
        account: Account | None = None,
    ) -> HttpAnswer:
        if self.dead:
            raise HttpCallError("it is dead")
        return await call(method, url, body, token=token, account=account)

    def context(
        self,
        server: SglangServer,
        folder: Path,
        strategy: WeightStrategy.ValueType = DISCARD,
        timeout_s: float = 20.0,
    ) -> HookContext:
        """The hook, with the notes that are on disk."""
        hook = Hook(name="model", sglang=SglangHook(url=server.url))
        hook.timeout.FromTimedelta(timedelta(seconds=timeout_s))
        record = HookRecord(self.notes, self.save)
        return context([hook], folder, strategy, measure=server.measure, record=record)


@pytest.fixture
def server() -> Iterator[SglangServer]:
    with serving(SglangServer()) as started:
        yield started


def calls(server: SglangServer) -> list[str]:
    return [path for path in server.paths() if path in (RELEASE, RESUME)]


@pytest.mark.parametrize("strategy", [OFFLOAD, DISCARD], ids=["offload", "discard"])
async def test_a_worker_that_dies_anywhere_ends_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: WeightStrategy.ValueType
) -> None:
    async def play(worker: Worker) -> list[str]:
        """Down and up, by a worker that may die, and undone by its next start, which looks twice."""
        monkeypatch.setattr(sglang_hook, "call", worker.call)
        with serving(SglangServer()) as server:
            with contextlib.suppress(OperationError):
                await runner.down(worker.context(server, tmp_path, strategy))
                await runner.up(worker.context(server, tmp_path, strategy))
            again = Worker()
            again.notes = worker.notes
            monkeypatch.setattr(sglang_hook, "call", again.call)
            for _ in range(2):
                assert await runner.roll_back(again.context(server, tmp_path, strategy)) == []
            assert server.serves
            assert not again.notes
            return calls(server)

    whole = Worker()
    assert await play(whole) == [RELEASE, RESUME]
    assert whole.writes > 5
    for number in range(whole.writes):
        for written in (False, True):
            made = await play(Worker(number, written=written))
            assert made in ([], [RELEASE, RESUME]), (number, written)


async def test_an_answer_that_is_lost_is_no_reason_to_resume_twice(
    server: SglangServer, tmp_path: Path
) -> None:
    worker = Worker()
    await runner.down(worker.context(server, tmp_path))
    server.deaf_to = {RESUME}
    with pytest.raises(OperationError, match="no answer"):
        await runner.up(worker.context(server, tmp_path))
    server.deaf_to = set()
    await runner.up(worker.context(server, tmp_path))
    assert server.serves
    assert calls(server) == [RELEASE, RESUME]


async def test_what_was_not_resumed_is_not_released_twice(server: SglangServer, tmp_path: Path) -> None:
    worker = Worker()
    await runner.down(worker.context(server, tmp_path))
    server.answers = {RESUME: [503]}
    up = worker.context(server, tmp_path)
    with pytest.raises(OperationError, match="503"):
        await runner.up(up)
    assert await runner.down_again(up) == []
    assert server.released
    await runner.up(worker.context(server, tmp_path))
    assert server.serves
    assert calls(server) == [RELEASE, RESUME, RESUME]


@pytest.mark.long
async def test_a_release_that_goes_on_after_its_timeout_is_undone_once_it_is_done(
    server: SglangServer, tmp_path: Path
) -> None:
    worker = Worker()
    server.slow = {RELEASE}
    with pytest.raises(OperationError, match="timed out"):
        await runner.down(worker.context(server, tmp_path, timeout_s=EXPIRING_S))
    await runner.up(worker.context(server, tmp_path))
    assert server.serves
    assert calls(server) == [RELEASE, RESUME]


@pytest.mark.long
async def test_a_resume_that_goes_on_after_its_timeout_is_not_made_again(
    server: SglangServer, tmp_path: Path
) -> None:
    worker = Worker()
    await runner.down(worker.context(server, tmp_path))
    server.slow = {RESUME}
    with pytest.raises(OperationError, match="timed out"):
        await runner.up(worker.context(server, tmp_path, timeout_s=EXPIRING_S))
    await runner.up(worker.context(server, tmp_path))
    assert server.serves
    assert calls(server) == [RELEASE, RESUME]


@pytest.mark.parametrize(
    ("before", "after", "now", "released"),
    [
        (100, None, 100, False),
        (100, None, 99, False),
        (100, None, 95, None),
        (100, None, 50, True),
        (100, 95, 100, False),
        (100, 95, 97, None),
        (100, 95, 96, True),
        (100, 5, 98, False),
        (100, 5, 50, None),
        (100, 5, 6, True),
        (100, 100, 100, None),
        (None, None, 100, None),
        (100, 5, None, None),
    ],
)
def test_what_nvml_says_of_a_release(
    before: int | None, after: int | None, now: int | None, released: bool | None
) -> None:
    assert sglang_hook._by_memory(before, after, now) is released


async def test_what_nobody_can_know_is_left_to_people(server: SglangServer, tmp_path: Path) -> None:
    worker = Worker()
    worker.notes = frozenset({"model", "model/releasing="})
    (warning,) = await runner.roll_back(worker.context(server, tmp_path))
    assert "it is unknown whether" in warning
    assert calls(server) == []
    assert server.serves
