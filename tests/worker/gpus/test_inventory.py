"""What is said of GPUs: of their health, while NVML hangs or is old, in processes on a simulated host."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from leasehold.v1 import errors_pb2
from leasehold_simgpu import SimulatedHost, ThrottleReason
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus import inventory as inventory_module
from leasehold_worker.gpus import nvml
from leasehold_worker.gpus.inventory import GpuReading, HealthReading, Inventory, XidWait

from tests.prefork import run

NOT_SUPPORTED, FUNCTION_NOT_FOUND, RESET_REQUIRED = 3, 13, 16
NEVER_S = 3600.0
"""A question that waits so long for an answer of its own ends no test."""


def ask_while_it_hangs(path: str) -> None:
    """What the test's own process can't do: it has no libnvidia-ml."""
    host = SimulatedHost.open(Path(path))
    inventory = Inventory()
    before = inventory.read()
    unknown = {gpu.uuid: GpuReading() for gpu in host.gpus}
    assert before.keys() == unknown.keys()
    inventory_module.ANSWER_TIMEOUT_S = 1.0  # type: ignore[misc]
    host.set_fault("nvmlDeviceGetMemoryInfo", hang=True)
    assert inventory.read() == unknown
    inventory_module.ANSWER_TIMEOUT_S = NEVER_S  # type: ignore[misc]
    for _ in range(20):
        assert inventory.read() == unknown
        assert inventory.usage() == {}
        assert not inventory.answers()
        for ask in (inventory.mig_enabled, inventory.mps_pids, lambda: inventory.room(())):
            with pytest.raises(OperationError, match="NVML did not answer") as raised:
                ask()
            assert raised.value.reason == errors_pb2.ERROR_REASON_DRIVER_TIMEOUT
    host.clear_faults()
    inventory_module.ANSWER_TIMEOUT_S = 10.0  # type: ignore[misc]
    while inventory.read() == unknown:
        time.sleep(0.01)
    assert inventory.read() == before
    assert inventory.usage().keys() == unknown.keys()


def health_of_new_and_old_chips(path: str) -> None:
    host = SimulatedHost.open(Path(path))
    new, old = (gpu.uuid for gpu in host.gpus)
    inventory = Inventory()
    assert list(inventory.health_lacks) == []
    healthy = HealthReading(ecc_uncorrected_errors=0, mig_enabled=False, throttle_reasons=0)
    assert inventory.read_health() == {
        new: replace(healthy, row_remap_pending=False, row_remap_failed=False),
        old: replace(healthy, retired_pages=0, retired_pages_pending=False),
    }
    host.set_readings(0, ecc_uncorrected=2, row_remap_pending=True, row_remap_failed=True, mig_enabled=True)
    host.set_readings(
        1,
        retired_pages_single_bit=3,
        retired_pages_double_bit=4,
        retired_pages_pending=True,
        throttle_reasons=ThrottleReason.HW_SLOWDOWN,
    )
    assert inventory.read_health() == {
        new: HealthReading(
            ecc_uncorrected_errors=2,
            row_remap_pending=True,
            row_remap_failed=True,
            mig_enabled=True,
            throttle_reasons=0,
        ),
        old: replace(healthy, retired_pages=7, retired_pages_pending=True, throttle_reasons=0x08),
    }
    host.lose_gpu(0)
    host.set_fault("nvmlDeviceGetTotalEccErrors", error=RESET_REQUIRED)
    readings = inventory.read_health()
    assert (readings[new].lost, readings[new].reset_required) == (True, True)
    assert (readings[old].lost, readings[old].reset_required) == (False, True)
    assert list(inventory.health_lacks) == []


def health_by_an_old_library(path: str) -> None:
    host = SimulatedHost.open(Path(path))
    host.set_readings(0, throttle_reasons=ThrottleReason.HW_SLOWDOWN)
    host.set_fault("nvmlDeviceGetCurrentClocksEventReasons", error=FUNCTION_NOT_FOUND)
    host.set_fault("nvmlDeviceGetMigMode", error=FUNCTION_NOT_FOUND)
    inventory = Inventory()
    assert list(inventory.health_lacks) == []
    assert [reading.throttle_reasons for reading in inventory.read_health().values()] == [8, 0, 0, 0]
    for call in (
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetRemappedRows",
        "nvmlEventSetWait",
    ):
        host.set_fault(call, error=FUNCTION_NOT_FOUND)
    host.set_fault("nvmlDeviceGetTotalEccErrors", error=NOT_SUPPORTED, times=1)
    assert set(inventory.read_health().values()) == {
        HealthReading(),
        HealthReading(ecc_uncorrected_errors=0),
    }
    assert inventory.wait_xids(30) == XidWait(unavailable_reason="Function Not Found")
    assert list(inventory.health_lacks) == [
        "uncorrectable memory errors: Not Supported (1 of 4 GPUs)",
        "row remaps and retired pages: Not Supported",
        "throttling: Function Not Found",
        "Xid events: Function Not Found",
    ]
    host.clear_faults()
    assert inventory.wait_xids(0) == XidWait()
    inventory.read_health()
    assert list(inventory.health_lacks) == []


def xids_come_while_others_ask(path: str) -> None:
    host = SimulatedHost.open(Path(path))
    first, second, *_ = (gpu.uuid for gpu in host.gpus)
    host.raise_xid(0, 31)
    inventory = Inventory()
    host.raise_xid(0, 13)
    host.raise_xid(0, 48)
    assert inventory.wait_xids(30) == XidWait(((first, 13), (first, 48)))
    found: list[XidWait] = []
    waiting = threading.Thread(target=lambda: found.append(inventory.wait_xids(30)))
    waiting.start()
    assert len(inventory.read_health()) == 4
    assert inventory.wait_xids(0.01) == XidWait(), "one thread waits at a time"
    host.raise_xid(1, 79)
    waiting.join()
    assert found == [XidWait(((second, 79),))]

    host.lose_gpu(1)
    assert inventory.wait_xids(30) == XidWait(unavailable_reason="GPU is lost")
    host.raise_xid(0, 95)
    assert inventory.wait_xids(0) == XidWait(), "those that came while nobody was registered are gone"
    host.raise_xid(0, 48)
    assert inventory.wait_xids(30) == XidWait(((first, 48),))
    assert list(inventory.health_lacks) == []
    host.lose_gpu(1, lost=False)
    inventory.wait_xids(0)
    host.raise_xid(1, 48)
    assert inventory.wait_xids(30) == XidWait(((second, 48),))


def no_events_at_all(path: str) -> None:
    host = SimulatedHost.open(Path(path))
    for call in ("nvmlEventSetCreate", "nvmlDeviceRegisterEvents"):
        host.set_fault(call, error=NOT_SUPPORTED)
        inventory = Inventory()
        assert list(inventory.health_lacks) == ["Xid events: Not Supported"]
        assert inventory.wait_xids(30) == XidWait(unavailable_reason="Not Supported")
        host.clear_faults()
        assert inventory.wait_xids(0) == XidWait()
        assert list(inventory.health_lacks) == []


def health_while_it_hangs(path: str) -> None:
    host = SimulatedHost.open(Path(path))
    inventory = Inventory()
    inventory_module.ANSWER_TIMEOUT_S = 1.0  # type: ignore[misc]
    host.set_fault("nvmlDeviceGetRemappedRows", hang=True)
    assert inventory.read_health() == {}
    assert "NVML did not answer" in inventory.health_lacks[0]
    host.raise_xid(0, 48)
    assert inventory.wait_xids(30).xids == ((host.gpus[0].uuid, 48),), "it needs no answer of the others"
    host.clear_faults()
    while not inventory.read_health():
        time.sleep(0.01)
    assert list(inventory.health_lacks) == []


def run_on_host(scenario: Callable[[str], None], host: SimulatedHost) -> None:
    """Runs a function of this module on the simulated host: this process has no libnvidia-ml."""
    name = scenario.__name__
    done = run(
        f"from {__name__} import {name}; {name}({str(host.directory)!r})",
        [],
        env={**os.environ, **host.environment()},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_an_nvml_that_hangs_is_not_waited_for_and_nothing_is_made_up(host: SimulatedHost) -> None:
    run_on_host(ask_while_it_hangs, host)


@pytest.mark.parametrize(
    "scenario",
    [
        health_by_an_old_library,
        xids_come_while_others_ask,
        pytest.param(no_events_at_all, marks=pytest.mark.long),
        pytest.param(health_while_it_hangs, marks=pytest.mark.long),
    ],
)
def test_health_is_what_nvml_says(scenario: Callable[[str], None], host: SimulatedHost) -> None:
    run_on_host(scenario, host)


@pytest.mark.long
def test_each_chip_knows_its_own_kind_of_repair(tmp_path: Path) -> None:
    run_on_host(
        health_of_new_and_old_chips, SimulatedHost.create(tmp_path / "mixed", gpus=2, chip=["H100", "T4"])
    )


def test_without_nvml_it_says_so() -> None:
    inventory = Inventory()
    assert inventory.read_health() == {}
    assert list(inventory.health_lacks) == ["all of NVML: NVML Shared Library Not Found"]
    assert inventory.wait_xids(30) == XidWait(unavailable_reason="NVML Shared Library Not Found")


def test_the_reserve_of_the_driver_is_not_used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's two structures, as an empty H100 fills them in MiB. The first counts the reserve as used."""
    first = SimpleNamespace(total=81_559, free=81_079, used=480)
    second = SimpleNamespace(total=81_559, free=81_079, used=0, reserved=480)

    def old(_gpu: nvml.Handle, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(FUNCTION_NOT_FOUND)
        return first

    gpu = nvml.Handle(object())
    for answer, used in ((lambda _gpu, version: second, 0), (old, 480)):
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", answer)
        assert nvml.read_sample(gpu).memory_used_bytes == used
        assert nvml.read_free_bytes(gpu) == second.free
