"""The daemons as the manifests start them: with the users, capabilities and settings of their containers."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED as SUCCEEDED
from leasehold.v1.operation_pb2 import AdoptOperation, RestoreOperation, SuspendOperation
from leasehold_coordinator.server.health_reports import LIVENESS
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.host.capabilities import FOR_MAPPED_USERS, NEEDED

from tests import environment
from tests.deploy.manifests import BASE, Object, find, pod
from tests.health_checks import SERVING, Prober
from tests.ports import free_port
from tests.worker.conftest import COUNTER
from tests.worker.scripted_coordinator import ScriptedCoordinator
from tests.worker.stories.test_membership import wait_until
from tests.worker.unix_users import (
    ALICE_UID,
    UserWorker,
    as_user,
    is_readable,
    needs_root,
    open_to_others,
    share,
    user_worker,
)

pytestmark = [
    needs_root,
    pytest.mark.skipif(not is_readable(), reason="other users can't read this checkout"),
]

LEASEHOLD: Final = ("sh", "-c", 'exec "$@"', "sh", sys.executable, "-m", "leasehold_client")
"""The program. The shell starts the interpreter, because setpriv itself still has root's capabilities."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, since sockets lie deep below."""
    with tempfile.TemporaryDirectory(dir=os.environ[environment.MARK]) as name:
        path = Path(name)
        open_to_others(path)
        yield path


def container(kind: str, name: str) -> Object:
    (only,) = pod(find(kind, name))["containers"]
    return only


def texts(value: Object) -> list[str]:
    return [str(one.value) for one in value]


def settings(name: str, folder: Path) -> tuple[Path, str]:
    """A daemon's settings with free ports and directories of this run, and the address for health checks."""
    text = (BASE / name / f"{name}.toml").read_text()
    text = re.sub(r"0\.0\.0\.0:74\d\d", lambda _: f"0.0.0.0:{free_port()}", text)
    text = re.sub(r'"/(var|run)/', rf'"{folder}/\1/', text)
    file = volume_of_map(folder / "settings", f"{name}.toml", text)
    port = re.search(r'health_listen = "0\.0\.0\.0:(\d+)"', text)
    assert port
    return file, f"127.0.0.1:{port[1]}"


def volume_of_map(volume: Path, name: str, text: str) -> Path:
    """The file of a ConfigMap or a Secret, which the kubelet replaces by two links."""
    version = volume / "..2026_11_26"
    version.mkdir(parents=True)
    (version / name).write_text(text)
    (volume / "..data").symlink_to(version.name)
    file = volume / name
    file.symlink_to(f"..data/{name}")
    return file


@contextmanager
def running(command: list[str], log: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon, which must end well."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **variables})
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(30)


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def capability_set(numbers: Collection[int]) -> str:
    """A set of capabilities as /proc/PID/status has it."""
    return f"{sum(1 << number for number in numbers):016x}"


@pytest.mark.long
def test_a_coordinator_of_its_own_user_serves_from_a_volume_of_its_group(folder: Path) -> None:
    context = pod(find("StatefulSet", "coordinator"))["securityContext"]
    uid, group = (str(context[key].value) for key in ("runAsUser", "fsGroup"))
    volume = folder / "var/lib/leasehold"
    volume.mkdir(parents=True)
    os.chown(volume, 0, int(group))
    volume.chmod(0o2775)  # as the kubelet leaves it
    file, address = settings("coordinator", folder)
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={group}", "--bounding-set=-all"]
    user += ["--inh-caps=-all", "--no-new-privs", "--"]
    variables = {
        "LEASEHOLD_COORDINATOR_CONFIG": str(file),
        "LEASEHOLD_COORDINATOR": f"unix:{volume}/coordinator/coordinator.sock",
        "HOME": str(folder / "none"),
    }
    for _ in range(2):  # the second pod finds the state of the first
        with running([*user, *LEASEHOLD, "coordinator"], folder / "log", variables):
            prober = Prober(address)
            assert (prober.check(LIVENESS), prober.check()) == (SERVING, SERVING)
            prober.channel.close()
            verb = [*user, *LEASEHOLD, "token", "create", "--worker", "gpu-*", "--uses", "3"]
            done = subprocess.run(
                verb, capture_output=True, text=True, env={**os.environ, **variables}, check=False
            )
            assert done.stdout.startswith("leasehold-join-"), done.stderr


@pytest.mark.long
def test_a_worker_starts_with_the_capabilities_of_its_container_and_no_others(folder: Path) -> None:
    only = container("DaemonSet", "worker")
    given = ",".join(f"+{name.lower()}" for name in texts(only["securityContext"]["capabilities"]["add"]))
    # What a container runtime leaves of root: its user, these capabilities, and no way to others.
    runtime = ["setpriv", "--inh-caps=-all", f"--bounding-set=-all,{given}", "--no-new-privs", "--"]
    command = texts(only["command"])
    split = command.index("leasehold")
    host = share(SimulatedHost.create(folder / "gpus", gpus=1, timing=Timing.instant()), folder / "share")
    file, address = settings("worker", folder)
    directories = [folder / "var/lib/leasehold/worker", folder / "run/leasehold/worker"]
    for one in directories:
        one.mkdir(parents=True)
    (start,) = pod(find("DaemonSet", "worker"))["initContainers"]
    owner = ["setpriv", "--inh-caps=-all", "--bounding-set=-all,+chown", "--no-new-privs", "--"]
    subprocess.run([*owner, *texts(start["command"])[:2], *directories], check=True)
    prepared = [*runtime, *command[:split], *LEASEHOLD, *command[split + 1 :]]
    variables = {**host, "LEASEHOLD_WORKER_CONFIG": str(file), "LEASEHOLD_WORKER_NAME": "node-1"}
    token = volume_of_map(folder / "join", "token", "leasehold-join-e30")
    option, file_name = texts(only["args"])
    assert file_name.endswith(f"/{token.name}")
    refused = subprocess.run(
        [*prepared, option, token],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert "what was given is no join token" in refused.stderr, "the file of a Secret is read"
    with running(prepared, folder / "log", variables) as process:
        prober = Prober(address)
        assert prober.check() == SERVING
        prober.channel.close()
        found = status(process.pid)
        assert found["Uid"].split() == ["10401"] * 4
        assert found["NoNewPrivs"] == "1"
        assert found["CapBnd"] == capability_set(NEEDED)
        kept = capability_set(NEEDED - FOR_MAPPED_USERS)  # the base has no run_as
        assert {found[name] for name in ("CapEff", "CapPrm", "CapAmb")} == {kept}
        assert (directories[1] / "worker.sock").is_socket()


@contextmanager
def worker_of_the_base(host: SimulatedHost, folder: Path) -> Iterator[UserWorker]:
    """A worker with the users that the base permits to adopt."""
    folder.mkdir()
    (adopted,) = re.findall(r"^adopt_users.*\n", (BASE / "worker/worker.toml").read_text(), re.MULTILINE)
    coordinator = ScriptedCoordinator()
    try:
        with user_worker(host, coordinator, folder, adopted) as started:
            yield started
    finally:
        coordinator.stop()


@contextmanager
def process_of_another_pod(
    worker: UserWorker, host: SimulatedHost, output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A counter in namespaces of its own. Its pids are those of the host, as the simulated driver needs."""
    namespaces = ["unshare", "--mount", "--net", "--ipc", "--uts", "--cgroup"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*namespaces, *as_user(ALICE_UID), sys.executable, str(COUNTER), "--bytes", "1MiB"],
            env={**worker.variables, "CUDA_VISIBLE_DEVICES": host.gpus[0].uuid},
            stdout=file,
            stderr=file,
            cwd="/",
        )
    try:
        wait_until(lambda: b"count=2" in output.read_bytes(), "it counts")
        yield process
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.long
def test_a_process_of_another_pod_is_adopted_and_outlives_the_worker(tmp_path: Path) -> None:
    """The worker is killed while the process is suspended. The next worker restores the process."""
    host = SimulatedHost.create(tmp_path / "gpus", gpus=2, timing=Timing.instant())
    output = tmp_path / "output"
    with (
        worker_of_the_base(host, tmp_path / "worker") as worker,
        process_of_another_pod(worker, host, output) as process,
    ):
        adopt = AdoptOperation(name="pod", pid=process.pid)
        assert worker.session.run("c-1", "w-1", adopt=adopt).state == SUCCEEDED
        assert worker.session.run("c-2", "w-1", suspend=SuspendOperation()).state == SUCCEEDED
        worker.restart()
        count = len(output.read_bytes())
        assert worker.session.run("c-3", "w-1", restore=RestoreOperation()).state == SUCCEEDED
        wait_until(lambda: len(output.read_bytes()) > count, "it counts on")
        assert process.poll() is None
