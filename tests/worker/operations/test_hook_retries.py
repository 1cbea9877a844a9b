"""Hooks that were not undone are called again by the worker itself, a few times."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing
from leasehold.v1 import errors_pb2, eviction_pb2, workload_pb2
from leasehold.v1.operation_pb2 import Operation
from leasehold.worker.v1.session_pb2 import CommandUpdate
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.operations.hook_retries import WAITS_S, HookRetries
from leasehold_worker.workloads.states import SUSPENDED
from leasehold_worker.workloads.workload import Hooked, Workload

LEFT = Hooked(eviction_pb2.EvictionPolicy(), ("engine",))


def make(name: str, hooked: Hooked | None) -> Workload:
    root, nowhere = ProcessIdentity(Pid(1), 0), Path("/nowhere")
    spec = workload_pb2.WorkloadSpec()
    return Workload(name, name, spec, root, nowhere, datetime.now(UTC), None, hooked=hooked)


class Host:
    """Workloads, and a worker that fails to wake them so often.

    Attributes:
        tried: When it tried whom.
    """

    def __init__(self, *workloads: Workload, failures: int) -> None:
        self.workloads = {workload.workload_id: workload for workload in workloads}
        self.tried: list[tuple[float, str]] = []
        self.failures = failures

    async def carry_out(self, workload_id: str, operation: Operation) -> CommandUpdate:
        assert operation.WhichOneof("kind") == "restore"
        self.tried.append((round(trio.current_time() - self.began_s), workload_id))
        await trio.sleep(0.1)
        if len(self.tried) <= self.failures:
            return CommandUpdate(error=errors_pb2.Error(message="no answer"))
        self.workloads[workload_id].hooked = None
        return CommandUpdate()

    async def run(self, for_s: float) -> None:
        self.began_s = trio.current_time()
        with trio.move_on_after(for_s):
            await HookRetries(self.workloads.values, self.carry_out).run()


async def test_it_is_tried_until_it_is_done(autojump_clock: trio.testing.MockClock) -> None:
    parked = make("parked", LEFT)
    parked.state = SUSPENDED
    host = Host(make("llm", LEFT), make("fine", None), parked, failures=2)
    await host.run(for_s=10_000)
    assert host.tried == [(5, "llm"), (15, "llm"), (35, "llm")]
    assert host.workloads["llm"].trouble is None


@pytest.mark.long
async def test_it_is_left_to_people_after_some_time_and_told_all_along(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(make("llm", LEFT), failures=1000)
    await host.run(for_s=10_000)
    assert len(host.tried) == len(WAITS_S)
    assert "with `leasehold wake`" in caplog.text
    trouble = host.workloads["llm"].trouble
    assert trouble is not None
    assert trouble.reason == errors_pb2.ERROR_REASON_HOOK_FAILED


async def test_what_somebody_else_woke_is_left_alone(autojump_clock: trio.testing.MockClock) -> None:
    host = Host(make("llm", LEFT), failures=0)

    async def wake() -> None:
        await trio.sleep(3)
        host.workloads["llm"].hooked = None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wake)
        await host.run(for_s=100)
    assert host.tried == []


async def test_what_another_command_parks_meanwhile_is_not_woken(
    autojump_clock: trio.testing.MockClock,
) -> None:
    workload = make("llm", LEFT)
    asked = 0

    async def refuse(workload_id: str, operation: Operation) -> CommandUpdate:
        nonlocal asked
        asked += 1
        await trio.lowlevel.checkpoint()
        if asked == 3:
            workload.state = SUSPENDED
        return CommandUpdate(error=errors_pb2.Error(reason=errors_pb2.ERROR_REASON_WORKLOAD_BUSY))

    with trio.move_on_after(1000):
        await HookRetries(lambda: [workload], refuse).run()
    assert asked == 3
