"""``leasehold doctor`` on hosts with nothing wrong, and with one thing wrong each."""

import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from leasehold_client.config import credentials_directory
from leasehold_coordinator.access.authority import open_authority
from leasehold_coordinator.server.transport import open_state
from leasehold_simgpu import SimulatedHost
from leasehold_worker.diagnostics.checks import CHECKS
from leasehold_worker.diagnostics.gpu_checks import mps_daemons
from leasehold_worker.files.enrolment_file import Enrolment, write_enrolment
from leasehold_worker.files.state_directory import open_state_directory

from tests.certificates import issue
from tests.channels import server_credentials
from tests.prefork import COMMAND_LINE, run
from tests.worker.conftest import Counter
from tests.worker.criu_cases import MakeCriu
from tests.worker.unix_users import WORKER_UID, as_user, is_readable, needs_root, open_to_others, share

DOCTOR = "from leasehold_worker.diagnostics.doctor_verb import command; command()"

Results = dict[str, tuple[str, str]]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=2, memory_bytes=2**30, persistence_mode=True)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", server_credentials())
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def doctor(
    host: SimulatedHost | None, *arguments: str, code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = host.environment() if host else {}
    variables = {**os.environ, **environment, **variables}
    done = run(COMMAND_LINE, ["doctor", *arguments], env=variables, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def examine(host: SimulatedHost | None, config: Path, *arguments: str, code: int) -> Results:
    done = doctor(host, "--config", str(config), "-o", "json", *arguments, code=code)
    checks = json.loads(done.stdout)["checks"]
    assert [check["name"] for check in checks] == list(CHECKS), "the same names, whatever is wrong"
    return {
        check["name"]: (check["result"].removeprefix("CHECK_RESULT_"), check["detail"]) for check in checks
    }


def refused(results: Results) -> list[str]:
    return [name for name, (result, _) in results.items() if result == "REFUSED"]


@pytest.fixture
def configure(tmp_path: Path, address: str) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = tmp_path / "worker.toml"
        path.write_text(
            "\n".join([f'coordinator = "{address}"', f'state_dir = "{tmp_path / "state"}"', *lines])
        )
        return path

    return write


def test_a_host_with_nothing_wrong(
    host: SimulatedHost, configure: Callable[..., Path], make_criu: MakeCriu
) -> None:
    results = examine(host, configure(f'criu = "{make_criu("").path}"'), code=0)
    wrong = {name: detail for name, (result, detail) in results.items() if result in ("REFUSED", "WARNING")}
    if os.geteuid() != 0:
        assert "CRIU needs root" in wrong.pop("criu")
    assert wrong == {}
    assert results["driver_remap"][1].startswith("CUDA 13.0")
    assert "2 x NVIDIA H100" in results["gpus"][1]
    assert "ptrace_scope" in results["trace_permission"][1]


@pytest.mark.long
@needs_root
@pytest.mark.parametrize(
    ("capabilities", "permission"),
    [
        pytest.param(
            ("sys_ptrace", "setuid"), "granted (uid 2000, with CAP_SYS_PTRACE", marks=pytest.mark.long
        ),
        (
            ("sys_ptrace",),
            "granted for processes of the worker's own user only (uid 2000, with CAP_SYS_PTRACE",
        ),
        pytest.param(
            ("setuid",),
            "granted for processes of the worker's own user only (uid 2000, without CAP_SYS_PTRACE",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_permission_for_the_own_user_only_is_no_permission_for_others(
    host: SimulatedHost, tmp_path: Path, address: str, capabilities: tuple[str, ...], permission: str
) -> None:
    if not is_readable():
        pytest.skip("other users can't read this checkout and its interpreter")
    open_to_others(tmp_path)
    command = [*as_user(WORKER_UID, *capabilities), sys.executable, "-c", DOCTOR, f"--coordinator={address}"]
    variables = {**os.environ, **share(host, tmp_path / "shared"), "HOME": "/nonexistent"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("trace_permission"))
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if "sys_ptrace" not in capabilities and scope.exists() and scope.read_text() != "0\n":
        assert "FAILED" in line
    else:
        assert permission in line, done.stdout + done.stderr


def test_the_table_ends_with_the_count(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    lines = doctor(host, "--config", str(configure('criu = "/nonexistent/criu"'))).stdout.splitlines()
    assert lines[-1] == f"{len(lines) - 1} checks: 0 failed, 1 warning"
    assert lines[0].split()[:2] == ["kernel", "ok"]


@pytest.mark.long
def test_a_host_without_any_driver(configure: Callable[..., Path]) -> None:
    results = examine(None, configure(), code=1)
    assert refused(results) == ["libcuda", "nvml"]
    assert "install the NVIDIA driver" in results["libcuda"][1]
    assert results["driver"] == ("NOT_CHECKED", "libcuda can't be used")
    assert results["gpus"][0] == "NOT_CHECKED"


@pytest.mark.parametrize(
    ("driver_version", "wrong"),
    [("550.54.15", ["driver", "driver_remap"]), ("575.57.08", ["driver_remap"])],
)
def test_an_old_driver(
    tmp_path: Path, configure: Callable[..., Path], driver_version: str, wrong: list[str]
) -> None:
    old = SimulatedHost.create(tmp_path / "old", gpus=1, memory_bytes=2**30, driver_version=driver_version)
    results = examine(old, configure(), code=1)
    assert refused(results) == wrong
    assert "update the driver" in results["driver_remap"][1]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (999, "dmesg"),
        pytest.param(802, "nvidia-fabricmanager", marks=pytest.mark.long),
        pytest.param(803, "reboot", marks=pytest.mark.long),
    ],
)
def test_an_init_that_fails(
    host: SimulatedHost, configure: Callable[..., Path], error: int, remedy: str
) -> None:
    host.set_fault("cuInit", error=error)
    results = examine(host, configure(), code=1)
    assert refused(results) == ["libcuda"]
    assert "CUDA_ERROR_" in results["libcuda"][1]
    assert remedy in results["libcuda"][1]


def test_gpus_of_unknown_memory_are_warned_of(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    host.set_fault("nvmlDeviceGetMemoryInfo", error=3)
    result, detail = examine(host, configure(), code=0)["gpus"]
    assert result == "WARNING"
    assert host.gpus[0].uuid in detail


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("cuInit", "libcuda"),
        pytest.param("nvmlInit", "nvml", marks=pytest.mark.long),
        pytest.param("nvmlDeviceGetMemoryInfo", "nvml", marks=pytest.mark.long),
    ],
)
def test_a_library_that_hangs(
    host: SimulatedHost, configure: Callable[..., Path], call: str, wrong: str
) -> None:
    host.set_fault(call, hang=True)
    results = examine(host, configure(), "--timeout", "2", code=1)
    assert refused(results) == [wrong]
    assert "dmesg" in results[wrong][1]


@pytest.mark.long
async def test_a_client_of_mps(
    host: SimulatedHost,
    configure: Callable[..., Path],
    start_counter: Callable[..., Counter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in host.environment().items():
        monkeypatch.setenv(name, value)
    counter = start_counter()
    await counter.wait_count()
    host.set_mps_client(counter.process.pid)
    result, detail = examine(host, configure(), code=0)["mps"]
    assert result == "WARNING"
    assert str(counter.process.pid) in detail


def test_the_daemons_of_mps_are_known_by_their_names(tmp_path: Path) -> None:
    for pid, command in ((7, "nvidia-cuda-mps"), (30, "python"), (4, "nvidia-cuda-mps")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(command + "\n")
    (tmp_path / "9").mkdir()  # ended meanwhile
    (tmp_path / "self").mkdir()
    assert mps_daemons(tmp_path) == [4, 7]


def test_mig(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    host.set_readings(1, mig_enabled=True)
    result, detail = examine(host, configure(), code=1)["mig"]
    assert result == "REFUSED"
    assert host.gpus[1].uuid in detail
    assert "nvidia-smi -mig 0" in detail


def test_a_lost_gpu(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    host.lose_gpu(1)
    result, detail = examine(host, configure(), code=1)["gpus"]
    assert result == "REFUSED"
    assert "look at nvidia-smi" in detail


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
    assert f"127.0.0.1:{port} does not answer (Connection refused): start it" in detail


def test_a_coordinator_without_credentials(
    host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path
) -> None:
    result, detail = examine(host, configure(f'credentials = "{tmp_path}"'), code=0)["coordinator"]
    assert result == "WARNING"
    assert "copy ca.pem and worker.token" in detail


def test_another_coordinator(host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path) -> None:
    open_state(tmp_path / "other")
    path = configure(f'credentials = "{tmp_path / "other"}"')
    result, detail = examine(host, path, code=0)["coordinator"]
    assert result == "WARNING"
    assert "CERTIFICATE_VERIFY_FAILED" in detail


def test_a_coordinator_without_tls(host: SimulatedHost, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = tmp_path / "worker.toml"
        config.write_text(f'coordinator = "insecure:127.0.0.1:{server.getsockname()[1]}"\n')
        result, detail = examine(host, config, code=0)["coordinator"]
    assert result == "WARNING"
    assert "has no TLS: start the coordinator without --insecure" in detail


def test_a_configuration_that_is_wrong(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    results = examine(host, configure("colour = 5"), code=1)
    assert refused(results) == ["configuration"]
    assert "colour" in results["configuration"][1]
    assert results["state_directory"][0] == results["coordinator"][0] == "NOT_CHECKED"


def test_a_state_directory_that_is_none(
    host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    assert refused(examine(host, configure(), code=1)) == ["state_directory"]
    deeper = str(tmp_path / "state" / "deeper")
    assert refused(examine(host, configure(), "--state-dir", deeper, code=1)) == ["state_directory"]


@pytest.mark.long
def test_nothing_is_made_where_there_is_no_state_directory(
    host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path
) -> None:
    result, detail = examine(host, configure(), code=0)["state_directory"]
    assert (result, detail.endswith("will be created at the first start")) == ("PASSED", True)
    (tmp_path / "state").mkdir()
    assert examine(host, configure(), code=0)["state_directory"][1].endswith("writable")
    assert list((tmp_path / "state").iterdir()) == []


def test_a_state_directory_that_a_worker_uses_is_fine(
    host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path
) -> None:
    with open_state_directory(tmp_path / "state"):
        result, detail = examine(host, configure(), code=0)["state_directory"]
    assert (result, detail.endswith("a worker uses it")) == ("PASSED", True)
    assert "no worker uses it" in examine(host, configure(), code=0)["state_directory"][1]


def test_variables_of_the_worker_count(host: SimulatedHost, address: str, tmp_path: Path) -> None:
    done = doctor(host, LEASEHOLD_WORKER_COORDINATOR=address, LEASEHOLD_STATE_DIR=str(tmp_path / "own"))
    assert f"{address} answers" in done.stdout
    assert f"{tmp_path / 'own'} will be created" in done.stdout


def test_wrong_usage_is_exit_2() -> None:
    assert "--timeout" in doctor(None, "--timeout", "0", code=2).stderr
    assert "nan is not a time" in doctor(None, "--timeout", "nan", code=2).stderr


@pytest.mark.long
def test_the_unix_users_of_workloads(host: SimulatedHost, configure: Callable[..., Path]) -> None:
    results = examine(host, configure('run_as = "no-such-user-here"'), code=1)
    assert refused(results) == ["run_as"]
    assert "a user that this host does not have" in results["run_as"][1]
    results = examine(host, configure("[run_as]", '"user/alice" = "2001:0"'), code=1)
    assert "user/alice is mapped to 2001:0, which is root" in results["run_as"][1]
    if os.geteuid() == 0:
        results = examine(host, configure("[run_as]", '"user/alice" = "2001:2001"'), code=0)
        assert results["run_as"][1] == "1 owners, each with a user of this host"
    else:
        results = examine(host, configure("[run_as]", '"user/alice" = "2001:2001"'), code=1)
        assert "this user lacks CAP_CHOWN" in results["run_as"][1]


@pytest.mark.long
def test_the_certificate_of_an_enrolled_worker(
    host: SimulatedHost, configure: Callable[..., Path], tmp_path: Path
) -> None:
    authority = open_authority(credentials_directory())
    for minutes, expected in ((60, "PASSED"), (-1, "REFUSED")):
        holder = issue(authority, "worker/gpu-07", life=datetime.timedelta(minutes=minutes))
        enrolment = Enrolment(
            identity="worker/gpu-07", certificate=holder.chain.decode(), authorities=holder.roots.decode()
        )
        (tmp_path / "state").mkdir(mode=0o700, exist_ok=True)
        write_enrolment(tmp_path / "state", enrolment)
        code = 0 if expected == "PASSED" else 1
        result, detail = examine(host, configure(), code=code)["coordinator"]
        assert result == expected
        assert ("this worker is worker/gpu-07" if expected == "PASSED" else "expired 1 minute ago") in detail
