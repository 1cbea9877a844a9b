"""The health monitor, in processes on a simulated host: this one has no libnvidia-ml."""

import logging
import os
from collections.abc import Awaitable, Callable

import pytest
import trio
from leasehold.v1 import gpu_pb2
from leasehold.v1.gpu_pb2 import GpuHealth
from leasehold_simgpu import SimulatedHost, ThrottleReason
from leasehold_worker.gpus.health_monitor import HealthMonitor
from leasehold_worker.gpus.inventory import Inventory

from tests.grids import grid
from tests.prefork import run

FUNCTION_NOT_FOUND, UNKNOWN = 13, 999
NEVER_S = 3600.0
OK, LOST, THROTTLED = gpu_pb2.GPU_HEALTH_OK, gpu_pb2.GPU_HEALTH_LOST, gpu_pb2.GPU_HEALTH_THROTTLED
XID_ERROR, ECC_FAILED = gpu_pb2.GPU_HEALTH_XID_ERROR, gpu_pb2.GPU_HEALTH_ECC_FAILED


class Reports:
    """Takes reports, and waits for them."""

    def __init__(self, inventory: Inventory, *, interval_s: float) -> None:
        self.taken: list[tuple[str, GpuHealth.ValueType, str]] = []
        self.monitor = HealthMonitor(inventory, self._take, interval_s=interval_s)

    def _take(self, gpu_uuid: str, health: GpuHealth.ValueType, reason: str) -> None:
        self.taken.append((gpu_uuid, health, reason))

    async def wait(self, gpu_uuid: str, health: GpuHealth.ValueType, says: str = "") -> None:
        """Waits for a report, and forgets those until then."""
        with trio.fail_after(20):
            while True:
                for place, (uuid, found, reason) in enumerate(self.taken):
                    if (uuid, found) == (gpu_uuid, health) and says in reason:
                        del self.taken[: place + 1]
                        return
                await trio.sleep(0.01)


async def monitored(
    inventory: Inventory, scenario: Callable[[Reports], Awaitable[None]], *, interval_s: float
) -> Reports:
    """Runs a monitor during a scenario. It ends with it, even if NVML never answers."""
    reports = Reports(inventory, interval_s=interval_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reports.monitor.run)
        await scenario(reports)
        nursery.cancel_scope.cancel()
    return reports


async def all_is_reported_again_and_again(host: SimulatedHost) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]

    async def scenario(reports: Reports) -> None:
        for uuid in uuids:
            await reports.wait(uuid, OK)
        for reading, health in {
            "ecc_uncorrected": ECC_FAILED,
            "row_remap_pending": gpu_pb2.GPU_HEALTH_ROW_REMAP_FAILED,
            "mig_enabled": gpu_pb2.GPU_HEALTH_MIG_ENABLED,
        }.items():
            host.set_readings(1, **{reading: 1})
            await reports.wait(uuids[1], health)
            host.set_readings(1, **{reading: 0})
            await reports.wait(uuids[1], OK)
        host.set_readings(2, throttle_reasons=ThrottleReason.SW_THERMAL_SLOWDOWN)
        await reports.wait(uuids[2], THROTTLED, "thermal")
        host.lose_gpu(3)
        await reports.wait(uuids[3], LOST)
        await reports.wait(uuids[0], OK)

    await monitored(Inventory(), scenario, interval_s=0.05)


async def xids_are_reported_at_once(host: SimulatedHost) -> None:
    first, second, third, _ = (gpu.uuid for gpu in host.gpus)

    async def scenario(reports: Reports) -> None:
        await reports.wait(third, OK)
        host.raise_xid(0, 31)
        await reports.wait(first, OK)
        assert not [progress for progress in reports.taken if progress[1] != OK]
        host.set_readings(1, ecc_uncorrected=1)
        host.raise_xid(1, 48)
        await reports.wait(second, XID_ERROR, "Xid 48, a double-bit memory error")
        await reports.wait(second, ECC_FAILED)
        host.lose_gpu(2)
        host.raise_xid(2, 79)
        await reports.wait(third, LOST, "Xid 79")
        await reports.wait(third, LOST, "NVML reports")
        with trio.fail_after(20):  # the others' events come again
            while (first, XID_ERROR) not in [progress[:2] for progress in reports.taken]:
                host.raise_xid(0, 119)
                await trio.sleep(0.2)

    await monitored(Inventory(), scenario, interval_s=NEVER_S)


async def a_look_on_demand(host: SimulatedHost) -> None:
    reports = Reports(Inventory(), interval_s=NEVER_S)
    host.set_readings(0, ecc_uncorrected=1)
    await reports.monitor.look()
    assert [health for _, health, _ in reports.taken] == [ECC_FAILED, OK, OK, OK]
    assert [bool(reason) for _, _, reason in reports.taken] == [True, False, False, False]


async def a_failing_nvml_ends_nothing(host: SimulatedHost) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("leasehold_worker.gpus.health_monitor").addHandler(handler)
    first = host.gpus[0].uuid
    for call in ("nvmlDeviceGetTotalEccErrors", "nvmlEventSetCreate"):
        host.set_fault(call, error=FUNCTION_NOT_FOUND)
    inventory = Inventory()

    async def scenario(reports: Reports) -> None:
        await reports.wait(first, OK)
        host.set_fault("nvmlDeviceGetRemappedRows", error=UNKNOWN)
        with trio.fail_after(20):
            # Events are watched by a task of its own, which may begin late.
            while not all(any(lack in line for line in logged) for lack in ("row remaps", "Xid events")):
                await reports.wait(first, OK)
        host.set_readings(0, mig_enabled=1)
        await reports.wait(first, gpu_pb2.GPU_HEALTH_MIG_ENABLED)
        host.clear_faults()
        with trio.fail_after(20):
            while (first, XID_ERROR) not in [progress[:2] for progress in reports.taken]:
                host.raise_xid(0, 48)
                await trio.sleep(0.2)

    await monitored(inventory, scenario, interval_s=0.05)
    # A fault that comes during a reading is one of the GPUs that are left.
    told = {line.partition(" (")[0] for line in logged if "monitored without" in line}
    assert told == {
        "the health of GPUs is monitored without Xid events: Function Not Found",
        "the health of GPUs is monitored without row remaps and retired pages: Unknown Error",
        "the health of GPUs is monitored without uncorrectable memory errors: Function Not Found",
    }, told


async def an_nvml_that_hangs_holds_up_no_shutdown(host: SimulatedHost) -> None:
    async def scenario(reports: Reports) -> None:
        await reports.wait(host.gpus[0].uuid, OK)
        host.set_fault("nvmlDeviceGetMigMode", hang=True, times=1)
        host.set_fault("nvmlEventSetWait", hang=True, times=1)
        with trio.fail_after(20):
            while host.faults():  # noqa: ASYNC110 - until both calls hang
                await trio.sleep(0.01)

    await monitored(Inventory(), scenario, interval_s=0.05)


SCENARIOS = [
    all_is_reported_again_and_again,
    xids_are_reported_at_once,
    a_look_on_demand,
    a_failing_nvml_ends_nothing,
    an_nvml_that_hangs_holds_up_no_shutdown,
]


def play(name: str, directory: str) -> None:
    """Plays a scenario in a process of its own."""
    trio.run(globals()[name], SimulatedHost.open(directory))


@pytest.mark.long
@pytest.mark.parametrize("scenario", grid(SCENARIOS, xids_are_reported_at_once))
def test_the_monitor_on_a_host_with_gpus(
    scenario: Callable[[SimulatedHost], Awaitable[None]], host: SimulatedHost
) -> None:
    done = run(
        f"from {__name__} import play; play({scenario.__name__!r}, {str(host.directory)!r})",
        [],
        env={**os.environ, **host.environment()},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


async def test_without_nvml_it_says_so_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports(Inventory(), interval_s=NEVER_S)
    with trio.fail_after(10):
        await reports.monitor.run()
        await reports.monitor.look()
    assert reports.taken == []
    without = [record.getMessage() for record in caplog.records if "monitored without" in record.getMessage()]
    assert without == [
        "the health of GPUs is monitored without all of NVML: NVML Shared Library Not Found",
    ]
