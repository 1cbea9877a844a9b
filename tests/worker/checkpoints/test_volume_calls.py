"""Calls on an image directory whose volume hangs: they end in time, and leave nothing behind."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Kernel
from leasehold.worker.v1.session_pb2 import CheckpointQuery
from leasehold_worker.checkpoints import volume_calls
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.image_store import ImageStore, PartialImage
from leasehold_worker.checkpoints.volume_calls import (
    CALLS_AT_ONCE,
    LongCall,
    call_volume,
    delete_in_volume,
    discard_in_time,
    end_in_time,
    long_volume_call,
)
from leasehold_worker.errors import OperationError
from leasehold_worker.session.checkpoint_query import answer_checkpoints

from tests.worker.checkpoints.test_directory import MIB, World, ids
from tests.worker.dead_volumes import dead_volume

HANG_S = 20.0
"""Longest time that a thread waits, if a test fails."""


@contextmanager
def hung() -> Iterator[threading.Event]:
    """A volume that hangs until the end of the context."""
    answers = threading.Event()
    try:
        yield answers
    finally:
        answers.set()


async def until(condition: threading.Event) -> None:
    with trio.fail_after(10):
        while not condition.is_set():  # noqa: ASYNC110 - a thread sets it
            await trio.sleep(0.01)


async def test_a_call_without_an_answer_ends_at_its_deadline() -> None:
    with (
        hung() as answers,
        trio.fail_after(5),
        pytest.raises(OperationError, match="did not answer within") as refused,
    ):
        await call_volume(answers.wait, HANG_S, timeout_s=0.1)
    assert refused.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE


async def test_a_cancellation_of_a_call_without_an_answer_takes_effect_at_once() -> None:
    with hung() as answers, trio.fail_after(5), trio.move_on_after(0.1) as scope:
        await call_volume(answers.wait, HANG_S)
    assert scope.cancelled_caught


async def test_calls_that_hang_are_bounded_and_further_ones_end_in_time() -> None:
    begun: list[threading.Event] = []

    def hang(answers: threading.Event) -> None:
        begun.append(answers)
        answers.wait(HANG_S)

    async def fail(answers: threading.Event) -> None:
        with pytest.raises(OperationError, match="did not answer within"):
            await call_volume(hang, answers, timeout_s=0.3)

    with hung() as answers, trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(CALLS_AT_ONCE + 4):
                nursery.start_soon(fail, answers)
        while len(begun) < CALLS_AT_ONCE:  # noqa: ASYNC110 - threads tell nobody
            await trio.sleep(0.01)
    assert len(begun) == CALLS_AT_ONCE
    assert await call_volume(lambda: 5) == 5, "the threads are free once the volume answers"


async def test_an_image_that_was_begun_too_late_is_deleted(tmp_path: Path) -> None:
    """Its lock would keep it from any sweep."""
    store, undone = ImageStore(tmp_path), threading.Event()

    def begin(answers: threading.Event) -> PartialImage:
        answers.wait(HANG_S)
        return store.begin("w-1")

    def undo(image: PartialImage) -> None:
        assert image.path.exists()
        image.discard()
        undone.set()

    with hung() as answers, pytest.raises(OperationError, match="did not answer within"):
        await call_volume(begin, answers, timeout_s=0.1, undo=undo)
    await until(undone)
    assert os.listdir(tmp_path) == []


async def test_a_reservation_that_was_given_up_deletes_nothing_later(tmp_path: Path) -> None:
    world, done = World(tmp_path / "images"), threading.Event()
    unneeded = world.image("gone", 3 * MIB)
    disk: CheckpointDirectory = world.disk(limit=5 * MIB, keep_images=True)

    def hold(answers: threading.Event) -> None:
        answers.wait(HANG_S)
        room.hold(4 * MIB)
        done.set()

    with hung() as answers, pytest.raises(OperationError, match="did not answer within"), disk.room() as room:
        await call_volume(hold, answers, timeout_s=0.1)
    await until(done)
    assert ids(disk) == [unneeded]
    assert room.held_bytes == 0


async def test_a_deletion_that_was_given_up_before_it_began_deletes_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.1)
    world, done = World(tmp_path / "images"), threading.Event()
    image = world.image("gone", MIB)
    disk = world.disk(keep_images=True)

    def delete(begin: Callable[[], None]) -> None:
        answers.wait(HANG_S)
        try:
            disk.delete([image], force=False, check=begin)
        finally:
            done.set()

    with hung() as answers, pytest.raises(OperationError, match="did not answer within"):
        await delete_in_volume(delete)
    await until(done)
    assert ids(disk) == [image]


async def test_a_deletion_that_has_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.1)

    def delete(begin: Callable[[], None]) -> str:
        begin()
        time.sleep(0.5)  # longer than the deadline
        return "deleted"

    with trio.fail_after(10):
        assert await delete_in_volume(delete) == "deleted"


async def test_a_list_of_checkpoints_on_a_dead_volume_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task is one of the session, which could not end and connect again before."""
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.2)
    world = World(tmp_path / "images")
    disk = world.disk(keep_images=True)
    with hung() as answers, trio.fail_after(5):
        monkeypatch.setattr(disk, "checkpoints", lambda _: answers.wait(HANG_S))
        answer = await answer_checkpoints(disk, CheckpointQuery(query_id="q-1"), "worker-1")
    assert answer.error.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE


async def test_a_removal_on_a_dead_volume_delays_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.2)
    with dead_volume(tmp_path / "volume"), trio.fail_after(5):
        await discard_in_time(tmp_path / "volume")


async def test_a_long_call_that_hangs_is_given_up_at_once_and_makes_nothing_final(tmp_path: Path) -> None:
    ended = threading.Event()
    final = tmp_path / "final"

    def write(call: LongCall) -> None:
        try:
            answers.wait(HANG_S)
            call.commit()
            final.touch()
        finally:
            ended.set()

    with hung() as answers, trio.fail_after(5), trio.move_on_after(0.1) as scope:
        await long_volume_call(write)
    assert scope.cancelled_caught
    await until(ended)
    assert not final.exists()


async def test_a_long_call_that_is_cancelled_after_its_commit_returns_its_result() -> None:
    with trio.CancelScope() as scope:

        def write(call: LongCall) -> str:
            call.commit()
            trio.from_thread.run_sync(scope.cancel)
            time.sleep(0.1)
            return "final"

        answer = await long_volume_call(write)
    assert answer == "final"


async def test_a_long_call_raises_its_own_error() -> None:
    def fail(_: LongCall) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        await long_volume_call(fail)


async def test_a_file_whose_volume_hangs_is_closed_and_deleted_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close waits for the other call in its own thread, so the descriptor stays open meanwhile."""
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.2)
    store = ApplicationStore(tmp_path)
    begun, ended = threading.Event(), threading.Event()

    def hang(function: Callable[..., object], *arguments: object) -> object:
        begun.set()
        answers.wait(HANG_S)
        try:
            return function(*arguments)
        finally:
            ended.set()

    def write(call: LongCall) -> None:
        writer.write(b"state")
        writer.commit({}, call.commit)

    writer = store.begin("w-1", "train", Kernel())
    with hung() as answers, trio.fail_after(5), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", partial(hang, os.fsync))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(long_volume_call, write)
                await until(begun)
                scope.cancel()
        await end_in_time(writer.close)
        assert os.listdir(tmp_path / "w-1") == [writer.path.name]
    await until(ended)
    with trio.fail_after(10):
        while (tmp_path / "w-1").exists():  # noqa: ASYNC110 - the thread of the close tells nobody
            await trio.sleep(0.01)
    assert store.scan("w-1") == []


async def test_a_file_is_closed_although_other_calls_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would close it later. A failed close is logged, and changes no outcome."""
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 1)

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def hang(answers: threading.Event) -> None:
        with suppress(OperationError):
            await call_volume(answers.wait, HANG_S, timeout_s=2)

    with hung() as answers, trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(CALLS_AT_ONCE):
                nursery.start_soon(hang, answers)
            await trio.sleep(0.1)
            await end_in_time(fail)
            assert "Input/output error" in caplog.text
            nursery.cancel_scope.cancel()
