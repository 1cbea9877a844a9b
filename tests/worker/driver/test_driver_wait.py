"""A driver that is not usable when the worker starts, and is later."""

from collections.abc import Callable

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold_simgpu import SimulatedHost
from leasehold_worker.driver import driver_wait
from leasehold_worker.driver.driver_wait import wait_for_driver
from leasehold_worker.driver.helper_pool import Driver, DriverUnavailableError, open_driver
from leasehold_worker.driver.members import find_members
from leasehold_worker.driver.process import CheckpointProcess
from leasehold_worker.errors import OperationError

from tests.worker.conftest import Counter, WorkerProcess
from tests.worker.driver.test_process import helpers
from tests.worker.operations.test_handler import SUCCEEDED, plan_of, start
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session

SYSTEM_NOT_READY = 802
"""The result of cuInit before the fabric manager has started."""


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_wait, "RETRY_MIN_S", 0.05)
    monkeypatch.setattr(driver_wait, "RETRY_MAX_S", 0.1)


def reason_of(driver: Driver) -> str | None:
    """Why no call can succeed now."""
    return driver.unavailable_reason


async def test_a_driver_is_used_once_its_init_succeeds(
    host: SimulatedHost, start_counter: Callable[..., Counter]
) -> None:
    counter = start_counter()
    await counter.wait_count()
    host.set_fault("cuInit", error=SYSTEM_NOT_READY)
    async with open_driver() as driver:
        assert reason_of(driver) == "cuInit: CUDA_ERROR_SYSTEM_NOT_READY"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_driver, driver)
            await trio.sleep(0.5)  # several probes fail
            assert reason_of(driver) == "cuInit: CUDA_ERROR_SYSTEM_NOT_READY"
            host.clear_faults()
            with trio.fail_after(20):
                while reason_of(driver) is not None:  # noqa: ASYNC110 - nothing tells
                    await trio.sleep(0.02)
        assert await CheckpointProcess(driver, counter.process.pid).is_running()
        assert len(helpers()) == 1, "no helper of a failed probe is left"


async def test_a_helper_whose_init_failed_serves_no_call(
    host: SimulatedHost, start_counter: Callable[..., Counter]
) -> None:
    """The driver would report each CUDA process as a process without CUDA."""
    counter = start_counter()
    await counter.wait_count()
    host.set_fault("cuInit", error=SYSTEM_NOT_READY)
    async with open_driver() as driver:
        assert helpers() == set()
        with pytest.raises(DriverUnavailableError, match="SYSTEM_NOT_READY"):
            await CheckpointProcess(driver, counter.process.pid).state()
        with pytest.raises(OperationError) as refused:
            await find_members(driver, [counter.identity])
        assert refused.value.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER


async def test_no_probe_follows_one_that_hangs_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.unavailable_reason = "cuInit did not return within 60 s"
    probes = 0

    async def probe() -> None:
        nonlocal probes
        await trio.lowlevel.checkpoint()
        probes += 1
        driver.unavailable_reason = None

    class Stuck:
        lives = True

    stuck = Stuck()
    monkeypatch.setattr(driver, "probe", probe)
    monkeypatch.setattr(driver, "_late_helper", stuck)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_driver, driver)
            await trio.sleep(0.5)
            assert probes == 0
            stuck.lives = False
    assert probes == 1


def capability(session: Session, name: str) -> bool:
    """Whether the last hello of a session has an available capability."""
    hello = next(
        (frame.hello for frame in reversed(session.frames) if frame.HasField("hello")), session.hello
    )
    (found,) = (each for each in hello.capabilities if each.name == name)
    assert found.available or "`leasehold doctor`" in found.reason
    return found.available


def test_a_worker_reports_a_driver_that_has_become_usable(
    host: SimulatedHost,
    start_worker: Callable[..., WorkerProcess],
    coordinator: ScriptedCoordinator,
) -> None:
    host.set_fault("cuInit", error=SYSTEM_NOT_READY)
    start_worker(host)
    session = coordinator.next_session()
    assert not capability(session, "cuda_suspend")
    host.clear_faults()
    session.wait(lambda frame: frame.HasField("hello"))
    assert capability(session, "cuda_suspend")
    assert capability(session, "gpu_remap")
    start(session, "w1")
    assert not plan_of(session, "w1", suspend=SuspendOperation()).refusals
    assert session.run("c1", "w1", suspend=SuspendOperation()).state == SUCCEEDED
