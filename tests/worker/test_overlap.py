"""Two questions that are asked at once."""

import pytest
import trio
import trio.testing
from leasehold.v1 import errors_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.overlap import both

FIRST = OperationError(errors_pb2.ERROR_REASON_WRONG_STATE, "the first")
SECOND = OperationError(errors_pb2.ERROR_REASON_NOT_READY, "the second")


async def test_each_question_is_under_way_while_the_other_is() -> None:
    met = [trio.Event(), trio.Event()]

    async def ask(mine: int) -> int:
        met[mine].set()
        await met[1 - mine].wait()
        return mine

    with trio.fail_after(10):
        assert await both(lambda: ask(0), lambda: ask(1)) == (0, 1)


async def test_the_first_question_s_error_is_raised_once_both_have_ended() -> None:
    ended: list[str] = []

    async def fail(error: OperationError, claim_waiting: int) -> None:
        for _ in range(claim_waiting):
            await trio.testing.wait_all_tasks_blocked()
        ended.append(error.message)
        raise error

    async def answer() -> int:
        await trio.lowlevel.checkpoint()
        ended.append("answered")
        return 1

    with pytest.raises(OperationError, match="the first"):
        await both(lambda: fail(FIRST, 2), lambda: fail(SECOND, 0))
    assert sorted(ended) == ["the first", "the second"]
    ended.clear()
    with pytest.raises(OperationError, match="the second"):
        await both(answer, lambda: fail(SECOND, 1))
    assert sorted(ended) == ["answered", "the second"]
