"""What is said of GPUs while NVML hangs, in a process on the simulated host."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold_simgpu import SimulatedHost
from leasehold_worker import inventory as inventory_module
from leasehold_worker.errors import OperationError
from leasehold_worker.inventory import GpuReading, Inventory

ROOT = Path(__file__).resolve().parents[2]


def ask_while_it_hangs(path: str) -> None:
    """What the test's own process can't do: it has no libnvidia-ml."""
    host = SimulatedHost.open(Path(path))
    inventory = Inventory()
    before = inventory.read()
    unknown = {gpu.uuid: GpuReading() for gpu in host.gpus}
    assert before.keys() == unknown.keys()
    inventory_module.ANSWER_TIMEOUT_S = 0.2  # type: ignore[misc]
    host.set_fault("nvmlDeviceGetMemoryInfo", hang=True)
    began = time.monotonic()
    for _ in range(20):
        assert inventory.read() == unknown
        assert inventory.usage() == {}
        assert not inventory.answers()
        for ask in (inventory.mig_enabled, inventory.mps_pids, lambda: inventory.free_bytes(())):
            with pytest.raises(OperationError, match="NVML does not answer") as raised:
                ask()
            assert raised.value.reason == errors_pb2.ERROR_REASON_DRIVER_TIMEOUT
    assert time.monotonic() - began < 20 * 0.2, "it was asked again before it had answered"
    host.clear_faults()
    inventory_module.ANSWER_TIMEOUT_S = 10.0  # type: ignore[misc]
    while inventory.read() == unknown:
        time.sleep(0.01)
    assert inventory.read() == before
    assert inventory.usage().keys() == unknown.keys()


def test_an_nvml_that_hangs_is_not_waited_for_and_nothing_is_made_up(
    host: SimulatedHost, tmp_path: Path
) -> None:
    program = f"from {__name__} import ask_while_it_hangs; ask_while_it_hangs({str(tmp_path / 'host')!r})"
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **host.environment()},
        timeout=30,
        check=True,
    )
