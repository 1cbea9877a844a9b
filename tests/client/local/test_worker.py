"""A user whom the worker's socket is closed to is told which group may use it, and what to ask for."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

import grpc
import pytest
from click.testing import CliRunner
from leasehold.local.v1.local_service_pb2 import (
    ClaimGranted,
    ClaimOpen,
    ClaimRequest,
    ClaimResponse,
    ClaimWaiting,
    ListRequest,
    ListResponse,
    ReleaseRequest,
    ReleaseResponse,
    ServeKernelRequest,
    ServeKernelResponse,
)
from leasehold.local.v1.local_service_pb2_grpc import LocalServiceServicer, add_LocalServiceServicer_to_server
from leasehold.v1.lease_pb2 import SLOT_STATE_FREE, SLOT_STATE_LEASED, GpuLease
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold_client.cli import exec_wait
from leasehold_client.cli.local import local as local_verbs
from leasehold_client.errors import LeaseholdError, UsageError
from leasehold_client.local import claim, lease, worker
from leasehold_client.local.worker import LocalWorker, NoWorkerError
from leasehold_client.messages import duration

AS_ANOTHER_USER = """
import importlib, os, pkgutil, sys
import leasehold_client
for module in pkgutil.walk_packages(leasehold_client.__path__, "leasehold_client."):
    if not module.name.endswith("__main__"):  # now: a checkout may be its owner's alone
        importlib.import_module(module.name)
from leasehold_client.main import main
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
main()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket that nobody but root may use, in a folder that everybody may search."""
    with TemporaryDirectory(dir="/tmp") as folder, closing(socket.socket(socket.AF_UNIX)) as listening:
        Path(folder).chmod(0o755)
        found = Path(folder) / "worker.sock"
        listening.bind(str(found))
        listening.listen()
        found.chmod(0)
        yield found
        Path(folder).chmod(0o700)


def run(path: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER_USER, *arguments],
        env={**os.environ, "LEASEHOLD_SOCKET": str(path), "HOME": "/"},  # the user's own may be closed to it
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("verb", "code"), [(["exec", "--", "true"], 125), (["local", "leases"], 1)])
def test_a_closed_socket_names_its_group_and_the_remedy(path: Path, verb: list[str], code: int) -> None:
    ended, stderr = run(path, *verb)
    assert ended == code
    assert f"may not use the worker's socket {path}, which belongs to group " in stderr
    assert "join that group, or ask for the worker's setting `socket_group`" in stderr


@pytest.mark.long
def test_a_closed_folder_is_told(path: Path) -> None:
    path.parent.chmod(0)
    code, stderr = run(path, "exec", "--", "true")
    assert code == 125
    assert "whose folder is closed to this user: ask for the worker's setting `socket_group`" in stderr


AS_PROGRAM = AS_ANOTHER_USER.replace(
    "main()\n", "from leasehold_client.local.worker import LocalWorker\nLocalWorker().list()\n"
)


@pytest.mark.long
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_closed_socket_of_a_coordinator_is_told_at_once(path: Path, is_folder: bool) -> None:
    if is_folder:
        path.parent.chmod(0)
    code, stderr = run(path, "get", "gpus", "--coordinator", f"unix:{path}")
    assert code == 1, stderr
    assert "waiting" not in stderr
    what = f"the directory {path.parent}" if is_folder else "the socket"
    assert f"may not use the coordinator's socket {path}: {what} belongs to user " in stderr
    assert "with mode 0000; call as " in stderr


@pytest.mark.long
def test_a_program_is_told_that_the_socket_is_closed(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_PROGRAM],
        env={**os.environ, "LEASEHOLD_SOCKET": str(path)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"may not use the worker's socket {path}, which belongs to group " in done.stderr


@pytest.mark.parametrize(("name", "what"), [("", "not a socket"), ("none", "no such socket")])
def test_a_path_that_is_no_socket_is_told(tmp_path: Path, name: str, what: str) -> None:
    with LocalWorker(tmp_path / name) as local, pytest.raises(NoWorkerError) as error:
        local.list()
    assert error.value.message.startswith(f"no worker answers at {tmp_path / name} ({what}): start ")


def test_a_socket_at_which_nothing_listens_is_told() -> None:
    with TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "worker.sock"
        with closing(socket.socket(socket.AF_UNIX)) as ended:
            ended.bind(str(path))
        with LocalWorker(path) as local, pytest.raises(NoWorkerError) as error:
            local.list()
    assert error.value.message.startswith(f"no worker answers at {path} (nothing listens there): start ")


def test_a_socket_of_another_service_is_told() -> None:
    with TemporaryDirectory(dir="/tmp") as folder, ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        path = Path(folder) / "coordinator.sock"
        server.add_insecure_port(f"unix:{path}")
        server.start()
        with LocalWorker(path) as local, pytest.raises(LeaseholdError) as error:
            local.list()
        server.stop(None).wait()
    assert not isinstance(error.value, NoWorkerError)
    told = f"the service at {path} lacks this call (Method not found!): name a worker's socket, and not "
    assert error.value.message.startswith(told)


def test_an_empty_or_too_long_path_is_refused() -> None:
    with pytest.raises(UsageError, match="the path of the worker's socket is empty"):
        LocalWorker("")
    with pytest.raises(UsageError, match="has more than 107 bytes"):
        LocalWorker("/tmp/" + "x" * 103)


@pytest.fixture
def silent_path() -> Iterator[Path]:
    """A socket that accepts connections and does not respond, as that of a stopped worker."""
    with TemporaryDirectory(dir="/tmp") as folder, closing(socket.socket(socket.AF_UNIX)) as listening:
        found = Path(folder) / "worker.sock"
        listening.bind(str(found))
        listening.listen()
        yield found


def test_a_silent_worker_ends_the_wait_of_a_claim(silent_path: Path) -> None:
    told: Queue[LeaseholdError] = Queue()

    def wait() -> None:
        try:
            with claim(wait_s=0, socket=silent_path):
                pass
        except LeaseholdError as error:
            told.put(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    message = told.get(timeout=15).message  # gRPC's own timeout is 20 s
    thread.join()
    assert message.startswith(f"the worker at {silent_path} did not answer in time: a process listens there")


def test_a_silent_worker_is_told_of(silent_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CALL_TIMEOUT_S", 0.1)
    with LocalWorker(silent_path) as local, pytest.raises(NoWorkerError) as error:
        local.list()
    assert error.value.message.endswith("does not respond; look at the process and its log")


def test_exec_says_that_a_worker_is_silent(
    silent_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "SHORTEST_CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(exec_wait, "SILENCE_S", 0.1)
    opened = ClaimOpen(wait=duration(0))
    with pytest.raises(NoWorkerError, match="did not answer in time"):
        exec_wait.wait_granted(silent_path, ClaimRequest(open=opened))
    assert capsys.readouterr().err == f"leasehold: the worker at {silent_path} does not answer yet\n"


class ScriptedWorker(LocalServiceServicer):
    """A worker whose first claim waits until the test ends it. Later claims are granted."""

    def __init__(self) -> None:
        self.then: Callable[[grpc.ServicerContext, float], object] = lambda context, wait_s: None
        self.is_away = False
        """Whether later claims find no worker."""
        self.over = threading.Event()
        self.waits_s: list[float] = []
        """The longest waits of the claims."""
        self.listed = ListResponse()
        self.left: Queue[bool] = Queue()
        """An entry for each stream that has ended."""

    def Claim(self, request: ClaimRequest, context: grpc.ServicerContext) -> Iterator[ClaimResponse]:
        context.add_callback(lambda: self.left.put(True))
        wait_s = request.open.wait.ToTimedelta().total_seconds()
        self.waits_s.append(wait_s)
        if self.is_away:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if len(self.waits_s) > 1:
            yield ClaimResponse(granted=ClaimGranted(workload_id="w-1", name="late"))
            self.over.wait(60)
            return
        yield ClaimResponse(waiting=ClaimWaiting(position=1, pending_claimers=1, reason="0 free"))
        self.then(context, wait_s)

    def Release(self, request: ReleaseRequest, context: grpc.ServicerContext) -> ReleaseResponse:
        return ReleaseResponse()

    def List(self, request: ListRequest, context: grpc.ServicerContext) -> ListResponse:
        return self.listed

    def ServeKernel(
        self, requests: Iterator[ServeKernelRequest], context: grpc.ServicerContext
    ) -> Iterator[ServeKernelResponse]:
        raise NotImplementedError


@pytest.fixture
def scripted() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def scripted_path(scripted: ScriptedWorker) -> Iterator[Path]:
    """The socket of the scripted worker."""
    with TemporaryDirectory(dir="/tmp") as folder, ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        add_LocalServiceServicer_to_server(scripted, server)
        found = Path(folder) / "worker.sock"
        server.add_insecure_port(f"unix:{found}")
        server.start()
        yield found
        scripted.over.set()
        server.stop(None).wait()


def wait_by_exec(path: Path, wait_s: float) -> None:
    exec_wait.wait_granted(path, ClaimRequest(open=ClaimOpen(wait=duration(wait_s))))[0].close()


def wait_by_claim(path: Path, wait_s: float) -> None:
    with claim(wait_s=wait_s, socket=path):
        pass


both_waits = pytest.mark.parametrize("wait", [wait_by_exec, wait_by_claim], ids=["exec", "claim"])


def end_of(wait: Callable[[Path, float], None], path: Path, wait_s: float) -> LeaseholdError | None:
    """The refusal at the end of a wait. None: it ended with a grant."""
    ended: Queue[LeaseholdError | None] = Queue()

    def run_wait() -> None:
        try:
            wait(path, wait_s)
        except LeaseholdError as error:
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=run_wait, daemon=True).start()
    return ended.get(timeout=30)


@both_waits
def test_a_worker_that_falls_silent_ends_the_wait(
    scripted: ScriptedWorker, scripted_path: Path, wait: Callable[[Path, float], None]
) -> None:
    scripted.then = lambda context, wait_s: scripted.over.wait(60)
    error = end_of(wait, scripted_path, 0.2)
    assert isinstance(error, NoWorkerError)
    assert error.message.startswith(f"the worker at {scripted_path} did not answer in time: ")
    assert scripted.left.get(timeout=30), "the worker is told that the claimant has gone"
    assert len(scripted.waits_s) == 1


@both_waits
def test_a_wait_that_is_over_gets_no_grant_of_the_next_start(
    scripted: ScriptedWorker,
    scripted_path: Path,
    wait: Callable[[Path, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "CALL_TIMEOUT_S", 60.0)  # so the worker is never silent

    def break_off_late(context: grpc.ServicerContext, wait_s: float) -> None:
        scripted.over.wait(wait_s)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    scripted.then = break_off_late
    error = end_of(wait, scripted_path, 0.2)
    assert isinstance(error, NoWorkerError)
    assert error.message.startswith(f"no worker answers at {scripted_path} (Socket closed): ")
    assert len(scripted.waits_s) == 1


@both_waits
def test_a_wait_goes_on_at_the_next_start_and_has_what_is_left(
    scripted: ScriptedWorker, scripted_path: Path, wait: Callable[[Path, float], None]
) -> None:
    scripted.then = lambda context, wait_s: context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert end_of(wait, scripted_path, 300) is None
    first, second = scripted.waits_s
    assert 0 < second < first == 300


@both_waits
def test_the_wait_ends_before_the_time_of_a_restart_is_over(
    scripted: ScriptedWorker,
    scripted_path: Path,
    wait: Callable[[Path, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "CALL_TIMEOUT_S", 60.0)  # so the worker is never silent
    monkeypatch.setattr(exec_wait, "RESTART_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(lease, "RESUME_TIMEOUT_S", 1000.0)

    def leave(context: grpc.ServicerContext, wait_s: float) -> None:
        scripted.is_away = True
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    scripted.then = leave
    error = end_of(wait, scripted_path, 0.5)
    assert isinstance(error, NoWorkerError)
    assert error.message.startswith(f"no worker answers at {scripted_path} (Socket closed): ")


@pytest.mark.parametrize(
    "call",
    [
        lambda path: claim(gpus=2**40, socket=path).__enter__(),
        lambda path: claim(priority=2**40, socket=path).__enter__(),
        lambda path: claim(name="\ud800", socket=path).__enter__(),
        lambda path: LocalWorker(path).release("\ud800"),
    ],
    ids=["gpus", "priority", "name", "release"],
)
def test_a_value_that_no_request_holds_is_a_usage_error(call: Callable[[Path], object], path: Path) -> None:
    with pytest.raises(UsageError, match=r"^invalid "):
        call(path)


def test_leases_are_listed_with_the_first_process_of_their_holder(
    scripted_path: Path, scripted: ScriptedWorker
) -> None:
    held = GpuLease(gpu_uuid="GPU-0", state=SLOT_STATE_LEASED, workload_id="w-1")
    holder = Workload(workload_id="w-1", name="a1", user="ann", status=WorkloadStatus(root_pid=4711))
    holder.status.lease.lease_id = "l-1"
    free = GpuLease(gpu_uuid="GPU-1", slot=1, state=SLOT_STATE_FREE)
    scripted.listed.CopyFrom(ListResponse(gpus=[held, free], workloads=[holder]))
    shown = CliRunner().invoke(local_verbs, ["leases", "--socket", str(scripted_path)])
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["SLOT", "GPU", "STATE", "HOLDER", "USER", "PID", "REASON"],
        ["0", "GPU-0", "leased", "a1", "ann", "4711", "-"],
        ["1", "GPU-1", "free", "-", "-", "-", "-"],
    ]
