"""The queue between trio and gRPC's sending thread."""

import threading

import pytest
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest, OutputChunk, WorkerLoad
from leasehold_worker.session.outbox import FRAME_LIMIT, Outbox, OutboxFullError


def load(sequence: int) -> ConnectRequest:
    return ConnectRequest(worker_load=WorkerLoad(sequence=sequence))


def update(command_id: str) -> ConnectRequest:
    return ConnectRequest(command_update=CommandUpdate(command_id=command_id))


def test_the_newest_load_takes_the_place_of_one_unsent() -> None:
    outbox = Outbox()
    outbox.put_load(load(1))
    outbox.put(update("a"))
    outbox.put_load(load(2))
    outbox.put(update("b"))
    outbox.close()
    assert list(outbox) == [update("a"), update("b"), load(2)]


def test_what_waits_is_sent_before_the_end_and_nothing_is_added_after_it() -> None:
    outbox = Outbox()
    outbox.put(update("a"))
    outbox.close()
    outbox.put(update("late"))
    outbox.put_load(load(1))
    assert list(outbox) == [update("a")]


def test_a_reader_that_stalls_is_an_error_and_not_memory() -> None:
    outbox = Outbox()
    for number in range(FRAME_LIMIT):
        outbox.put(update(str(number)))
    assert outbox.waiting == FRAME_LIMIT
    with pytest.raises(OutboxFullError):
        outbox.put(update("one more"))
    outbox.close()
    outbox.put(update("after its end"))
    assert len(list(outbox)) == FRAME_LIMIT


def test_a_waiting_reader_is_woken() -> None:
    outbox = Outbox()
    got: list[ConnectRequest] = []
    reader = threading.Thread(target=lambda: got.extend(outbox))
    reader.start()
    outbox.put(update("a"))
    outbox.close()
    reader.join(5)
    assert not reader.is_alive()
    assert got == [update("a")]


def chunk(read_id: str) -> ConnectRequest:
    return ConnectRequest(output_chunk=OutputChunk(read_id=read_id))


def test_answers_go_behind_news_and_loads() -> None:
    outbox = Outbox()
    outbox.put_answer(chunk("a"))
    outbox.put_answer(chunk("b"))
    outbox.put_load(load(1))
    outbox.put(update("news"))
    assert [next(outbox) for _ in range(4)] == [update("news"), load(1), chunk("a"), chunk("b")]


def test_answers_take_no_room_of_news_and_are_dropped_at_the_end() -> None:
    outbox = Outbox()
    while outbox.has_room:
        outbox.put_answer(chunk("a"))
    for number in range(FRAME_LIMIT):
        outbox.put(update(str(number)))
    outbox.close()
    assert list(outbox) == [update(str(number)) for number in range(FRAME_LIMIT)]
