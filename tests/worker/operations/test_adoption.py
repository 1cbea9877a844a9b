"""What is told of processes that others started, and operations that are done before they are over."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from leasehold.v1 import errors_pb2, hook_pb2
from leasehold.v1.hook_pb2 import CommandHook, Hook, HttpHook, KernelHook, SignalHook, WorkDrain
from leasehold.v1.operation_pb2 import AdoptOperation, ResetGpuHealthOperation
from leasehold_simgpu import SimulatedHost
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.leases import FREE, UNHEALTHY
from leasehold_worker.operations import adoption
from leasehold_worker.workloads.workload import ARGUMENTS_LIMIT, told_arguments

from tests.grids import grid
from tests.worker.conftest import Counter

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], []),
        (["python", "train.py"], ["python", "train.py"]),
        (["x" * (ARGUMENTS_LIMIT + 1)], ["x" * (ARGUMENTS_LIMIT - 1) + "…"]),
        (["a", "b" * ARGUMENTS_LIMIT, "c"], ["a", "b" * (ARGUMENTS_LIMIT - 3) + "…"]),
        (["x" * (ARGUMENTS_LIMIT - 1), "a", "b"], ["x" * (ARGUMENTS_LIMIT - 1), "…"]),
    ],
)
def test_of_long_arguments_the_first_are_told(arguments: list[str], told: list[str]) -> None:
    assert told_arguments(arguments) == told
    assert sum(map(len, told)) <= ARGUMENTS_LIMIT


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


async def reason_of_refusal(config: WorkerConfig, folder: Path, pid: int, owner: str, *hooks: Hook) -> int:
    """Why a process that uses no GPU is not adopted."""
    async with open_parts(config, folder, lambda _: None) as parts:
        with pytest.raises(OperationError) as raised:
            await parts.adoption.check(AdoptOperation(pid=pid, hooks=hooks), owner)
        return raised.value.reason


PROBE = Hook(
    name="probe", phase=hook_pb2.HOOK_PHASE_READINESS, command=CommandHook(arguments=["cp", "/bin/sh", "/x"])
)
REQUEST = HttpHook(method="GET", url="http://127.0.0.1:1/")
DRAINING = WorkDrain(idle=REQUEST)


@pytest.mark.parametrize(
    ("coordinator", "owner"),
    [("127.0.0.1:1", "user/alice"), ("insecure:127.0.0.1:1", "local/root"), ("10.0.0.1:1", "local/root")],
)
async def test_without_run_as_a_hook_acts_only_for_whom_a_program_would_start(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, coordinator: str, owner: str
) -> None:
    """Otherwise, the hook would give a remote coordinator the rights of the worker's user."""
    config = WorkerConfig(state_dir=tmp_path, coordinator=coordinator)
    reason = await reason_of_refusal(config, tmp_path, sleeper.pid, owner, PROBE)
    assert reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
    reason = await reason_of_refusal(config, tmp_path, sleeper.pid, owner)
    assert reason != errors_pb2.ERROR_REASON_NOT_PERMITTED


@pytest.mark.parametrize(
    "hook",
    [
        Hook(
            name="signal",
            phase=hook_pb2.HOOK_PHASE_BEFORE_SUSPEND,
            signal=SignalHook(signal_number=10),
            drain=DRAINING,
        ),
        Hook(name="kernel", kernel=KernelHook(), drain=DRAINING),
    ],
    ids=lambda hook: hook.name,
)
async def test_with_run_as_a_drain_acts_for_the_owners_user_only(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, hook: Hook
) -> None:
    """The requests of a drain would go out as the worker's user, with any credential file of that user."""
    config = WorkerConfig(
        state_dir=tmp_path, run_as={"user/alice": "2001:2001"}, adopt_users=[str(os.geteuid())]
    )
    reason = await reason_of_refusal(config, tmp_path, sleeper.pid, "user/alice", hook)
    assert reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
    hook.ClearField("drain")
    reason = await reason_of_refusal(config, tmp_path, sleeper.pid, "user/alice", hook)
    assert reason != errors_pb2.ERROR_REASON_NOT_PERMITTED


def cancelling(question: Callable[[], Any], scope: trio.CancelScope, *, after: int) -> Callable[[], Any]:
    """NVML, of which a question cancels the scope while it is answered, after so many that don't."""
    token = trio.lowlevel.current_trio_token()
    asked: list[int] = []

    def ask() -> object:
        asked.append(1)
        if len(asked) > after:
            token.run_sync_soon(scope.cancel)
            time.sleep(0.3)
        return question()

    return ask


def check_done(scope: trio.CancelScope) -> None:
    assert scope.cancel_called
    assert not scope.cancelled_caught, "it was cancelled, and had been done"


async def adopt_is_done(host: SimulatedHost, folder: Path, pid: int) -> None:
    async with open_parts(WorkerConfig(state_dir=folder), folder, lambda _: None) as parts:
        with trio.fail_after(30), trio.CancelScope() as scope:
            ask = cancelling(parts.inventory.usage, scope, after=1)  # the first says on which GPUs it is
            parts.inventory.usage = ask  # type: ignore[method-assign]
            await parts.adoption.adopt("w-1", AdoptOperation(pid=pid), Progress.unheard())
        check_done(scope)
        assert parts.workloads.get("w-1").lease is not None


async def reset_is_done(host: SimulatedHost, folder: Path, _: int) -> None:
    gpu_uuid = host.gpus[0].uuid
    async with open_parts(WorkerConfig(state_dir=folder), folder, lambda _: None) as parts:
        host.set_readings(0, ecc_uncorrected=1)
        await parts.health.look()
        assert parts.pool.slots.get(gpu_uuid).state == UNHEALTHY
        host.set_readings(0, ecc_uncorrected=0)
        with trio.fail_after(30), trio.CancelScope() as scope:
            ask = cancelling(parts.inventory.read_health, scope, after=0)
            parts.inventory.read_health = ask  # type: ignore[method-assign]
            await parts.cordons.reset_health(ResetGpuHealthOperation(gpu_uuids=[gpu_uuid]))
        check_done(scope)
        assert parts.pool.slots.get(gpu_uuid).state == FREE


async def a_process_that_can_not_be_read(host: SimulatedHost, folder: Path, pid: int) -> None:
    released = threading.Event()

    def hang(pid: int) -> list[str]:
        assert threading.current_thread() is not threading.main_thread(), "it would hold up all of the worker"
        released.wait(20)
        return ["python"]

    adoption.command_line = hang  # type: ignore[attr-defined]
    adoption.READ_TIMEOUT_S = 0.2  # type: ignore[misc]
    async with open_parts(WorkerConfig(state_dir=folder), folder, lambda _: None) as parts:
        operation = AdoptOperation(pid=pid)
        try:
            with pytest.raises(OperationError, match="can't be read within") as raised:
                await parts.adoption.adopt("w-1", operation, Progress.unheard())
            assert raised.value.reason == errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE
        finally:
            released.set()
        adoption.READ_TIMEOUT_S = 20.0  # type: ignore[misc]
        await parts.adoption.adopt("w-1", operation, Progress.unheard())


SCENARIOS = [adopt_is_done, reset_is_done, a_process_that_can_not_be_read]


def play(name: str, directory: str, folder: str, pid: int) -> None:
    """Plays a scenario in a process of its own: that of the tests has no libnvidia-ml."""
    trio.run(globals()[name], SimulatedHost.open(directory), Path(folder), pid)


@pytest.mark.long
@pytest.mark.parametrize("scenario", grid(SCENARIOS, adopt_is_done))
async def test_on_a_host_with_gpus(
    scenario: Callable[[SimulatedHost, Path, int], Awaitable[None]],
    host: SimulatedHost,
    start_counter: Callable[..., Counter],
    tmp_path: Path,
) -> None:
    counter = start_counter()
    await counter.wait_count()
    arguments = (scenario.__name__, str(host.directory), str(tmp_path / "state"), counter.process.pid)
    await trio.run_process(
        [sys.executable, "-c", f"from {__name__} import play; play{arguments!r}"],
        cwd=ROOT,
        env={**os.environ, **host.environment()},
    )
    await counter.wait_count()
