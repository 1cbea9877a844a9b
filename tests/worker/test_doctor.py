"""``leasehold doctor`` on hosts with nothing wrong, and with one thing wrong each."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost
from leasehold_worker.state_directory import open_state_directory

Results = dict[str, tuple[str, str]]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=2, memory_bytes=2**30, persistence_mode=True)


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def doctor(host: SimulatedHost | None, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = host.environment() if host else {}
    done = subprocess.run(
        [sys.executable, "-m", "leasehold_client", "doctor", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def examine(host: SimulatedHost | None, config: Path, *, code: int) -> Results:
    done = doctor(host, "--config", str(config), "-o", "json", code=code)
    checks = json.loads(done.stdout)["checks"]
    assert len({check["name"] for check in checks}) == len(checks)
    return {
        check["name"]: (check["result"].removeprefix("CHECK_RESULT_"), check["detail"]) for check in checks
    }


@pytest.fixture
def configure(tmp_path: Path, address: str) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = tmp_path / "worker.toml"
        path.write_text(
            "\n".join([f'coordinator = "{address}"', f'state_dir = "{tmp_path / "state"}"', *lines])
        )
        return path

    return write


def test_a_host_with_nothing_wrong(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    results = examine(host, configure(), code=0)
    wrong = {name: result for name, result in results.items() if result[0] in ("REFUSED", "WARNING")}
    assert wrong == {}
    assert results["driver_remap"][1].startswith("CUDA 13.0")
    assert "2 (NVIDIA H100" in results["gpus"][1]


def test_the_table_ends_with_the_count(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    lines = doctor(host, "--config", str(configure())).stdout.splitlines()
    assert lines[-1] == f"{len(lines) - 1} checks: 0 failed, 0 warnings"
    assert lines[0].split()[:2] == ["kernel", "ok"]


def test_a_host_without_any_driver(configure: Callable[..., Path]) -> None:
    results = examine(None, configure(), code=1)
    assert [name for name, result in results.items() if result[0] == "REFUSED"] == [
        *("driver", "driver_remap", "nvml", "gpus")
    ]
    assert "install" in results["driver"][1]


@pytest.mark.parametrize(
    ("driver_version", "failed"),
    [("550.54.15", ["driver", "driver_remap"]), ("575.57.08", ["driver_remap"])],
)
def test_an_old_driver(
    tmp_path: Path, configure: Callable[..., Path], driver_version: str, failed: list[str]
) -> None:
    old = SimulatedHost.create(tmp_path / "old", gpus=1, memory_bytes=2**30, driver_version=driver_version)
    results = examine(old, configure(), code=1)
    assert [name for name, result in results.items() if result[0] == "REFUSED"] == failed
    assert "update the driver" in results["driver_remap"][1]


def test_an_init_that_fails(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    host.set_fault("cuInit", error=999)
    results = examine(host, configure(), code=1)
    assert results["driver"][0] == "REFUSED"
    assert "CUDA_ERROR_UNKNOWN" in results["driver"][1]


def test_mig(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    host.set_readings(1, mig_enabled=True)
    result, detail = examine(host, configure(), code=1)["mig"]
    assert result == "REFUSED"
    assert host.gpus[1].uuid in detail
    assert "nvidia-smi -mig 0" in detail


def test_a_lost_gpu(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    host.lose_gpu(1)
    assert examine(host, configure(), code=1)["gpus"][0] == "REFUSED"


def test_persistence_mode_is_advised(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    host.set_persistence_mode(False)
    result, detail = examine(host, configure(), code=0)["persistence_mode"]
    assert result == "WARNING"
    assert "nvidia-smi -pm 1" in detail


def test_little_host_memory(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    results = examine(host, configure(f"host_memory_reserve_bytes = {2**50}"), code=0)
    assert results["host_memory"][0] == "WARNING"


def test_a_coordinator_that_is_not_there(host: SimulatedHost, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = tmp_path / "worker.toml"
    config.write_text(f'coordinator = "127.0.0.1:{port}"\n')
    result, detail = examine(host, config, code=0)["coordinator"]
    assert result == "WARNING"
    assert f"127.0.0.1:{port} does not answer" in detail


def test_a_configuration_that_is_wrong(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    result, detail = examine(host, configure("colour = 5"), code=1)["configuration"]
    assert result == "REFUSED"
    assert "colour" in detail


def test_a_state_directory_that_is_none(
    host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    assert examine(host, configure(), code=1)["state_directory"][0] == "REFUSED"


def test_a_state_directory_that_a_worker_uses_is_fine(
    host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path
) -> None:
    with open_state_directory(tmp_path / "state"):
        assert examine(host, configure(), code=0)["state_directory"][0] == "PASSED"
