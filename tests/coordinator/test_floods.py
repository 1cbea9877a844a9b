"""What one peer sends in masses costs no other its session or its calls."""

import asyncio
from pathlib import Path

from leasehold.v1 import command_pb2
from leasehold_coordinator.sessions import FRAME_LIMIT

from .bench import Bench, on_bench


def test_many_cancellations_do_not_end_a_workers_session(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        command = await bench.send()
        await asyncio.gather(*(bench.dispatcher.cancel(command) for _ in range(FRAME_LIMIT)))
        assert not bench.session.ended.is_set()
        assert [frame.command.cancel for frame in bench.sent()] == [False, True]
        assert (await bench.stored()).state == command_pb2.COMMAND_STATE_DISPATCHED

    on_bench(tmp_path, scenario)
