"""The socket of the local API: who is let in, and how a worker takes it over."""

import contextlib
import grp
import hashlib
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO

import grpc
import pytest
import trio
from leasehold.local.v1 import local_service_pb2
from leasehold.local.v1.local_service_pb2_grpc import LocalServiceStub
from leasehold_client.errors import LeaseholdError
from leasehold_client.local import LocalWorker
from leasehold_worker.errors import StartError
from leasehold_worker.files.file_descriptors import LIMIT
from leasehold_worker.host.peers import Peer, by_credentials
from leasehold_worker.host.processes import identify
from leasehold_worker.local_api import unix_socket
from leasehold_worker.local_api.service import CLAIMS_LIMIT, KERNELS_LIMIT, OTHER_CALLS_LIMIT, STREAMS_LIMIT
from leasehold_worker.local_api.unix_socket import (
    CONNECTIONS_LIMIT,
    PATH_LIMIT,
    USER_CONNECTIONS_LIMIT,
    LocalSocket,
)

from tests.prefork import run
from tests.worker.conftest import WorkerProcess

NOBODY = 65534
GROUP = grp.getgrgid(1).gr_name

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

BECOME = """
import importlib, os, pkgutil, sys
import google.rpc.error_details_pb2, grpc, grpc_status.rpc_status, leasehold_client
for module in pkgutil.walk_packages(leasehold_client.__path__, "leasehold_client."):
    if not module.name.endswith("__main__"):  # now: a checkout may be its owner's alone
        importlib.import_module(module.name)
from leasehold_client import local
from leasehold_client.errors import LeaseholdError
path, ids, name = sys.argv[1:]
grpc.insecure_channel("unix:" + path).close()  # imports the rest of grpc
uid, gid, *groups = map(int, ids.split(","))
os.setgroups(groups)
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
"""

ASK = f"""{BECOME}
try:
    with local.LocalWorker(path) as worker:
        print(worker.release(name).name if name else f"{{len(worker.list().gpus)}} GPUs")
except local.NoWorkerError:
    print("no worker")
except LeaseholdError as error:
    print(error.reason, error.message)
"""
"""Lists, or releases a claim by its name."""

HOLD = f"""{BECOME}
with local.claim(gpus=0, name=name, socket=path) as lease:
    print("held", flush=True)
    lease.ended.wait()
"""
"""Holds a claim until somebody ends it."""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path in a folder that every user may look into, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="leasehold"))
    folder.chmod(0o755)
    yield folder / "worker.sock"
    shutil.rmtree(folder)


Serve = Callable[..., WorkerProcess]


@pytest.fixture
def serve(start_worker: Callable[..., WorkerProcess], path: Path, tmp_path: Path) -> Serve:
    """Starts a worker without GPUs that serves at the path, with more settings."""

    def start(settings: str = "", state: str = "state") -> WorkerProcess:
        config = tmp_path / f"{state}.toml"
        config.write_text(f'socket = "{path}"\n{settings}')
        worker = start_worker(None, state, coordinator="127.0.0.1:1", config=str(config))
        deadline = time.monotonic() + 30
        while worker.process.poll() is None and not is_served(path):
            assert time.monotonic() < deadline, worker.log.read_text()
            time.sleep(0.01)
        return worker

    return start


def is_served(path: Path) -> bool:
    try:
        with LocalWorker(path) as worker:
            worker.list()
    except LeaseholdError:  # nobody may use a socket before its mode is set
        return False
    return True


def ask(path: Path, *ids: int, release: str = "") -> str:
    """What the worker answers a user, by number, who is in groups."""
    arguments = [str(path), ",".join(map(str, ids)), release]
    done = run(ASK, arguments, env=os.environ, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def facts(path: Path) -> tuple[int, int]:
    found = path.stat()
    return stat.S_IMODE(found.st_mode), found.st_gid


@pytest.mark.long
@needs_root
def test_the_worker_s_user_its_group_and_root_are_let_in(serve: Serve, path: Path) -> None:
    worker = serve(f'socket_group = "{GROUP}"')
    assert facts(path) == (0o660, 1)
    assert f"user {NOBODY} may not use the worker's socket" in ask(path, NOBODY, NOBODY)
    assert ask(path, NOBODY, NOBODY, 1) == "no worker", "supplementary groups are those of the user's entry"
    assert ask(path, NOBODY, 1) == "0 GPUs"
    path.chmod(0o666)  # the worker asks the kernel besides
    assert ask(path, NOBODY, NOBODY) == "no worker"
    assert ask(path, 0, NOBODY) == "0 GPUs"
    log = worker.log.read_text()
    assert re.search(rf"a connection of process \d+ of user nobody \(uid {NOBODY}\)", log), log
    assert worker.stop() == 0
    assert not path.exists()


@pytest.mark.long
@needs_root
def test_a_claim_is_released_by_its_user_the_worker_s_and_root_only(serve: Serve, path: Path) -> None:
    served = serve(f'socket_group = "{GROUP}"')
    for releaser in (NOBODY, 0):
        command = [sys.executable, "-c", HOLD, str(path), f"{NOBODY},1", f"of-{releaser}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            try:
                assert holder.stdout.readline() == "held\n"
                with LocalWorker(path) as worker:
                    assert [workload.user for workload in worker.list().workloads] == ["nobody"]
                refused = ask(path, 2, 1, release=f"of-{releaser}")
                assert refused.startswith("NOT_PERMITTED"), refused
                assert ask(path, releaser, 1, release=f"of-{releaser}") == f"of-{releaser}"
                assert holder.wait(10) == 0
            finally:
                holder.kill()
    log = served.log.read_text()
    named = r"refused Release to process \d+ of user \S+ \(uid 2\): workload of-\d+ is of user nobody"
    assert re.search(named, log), log


def inner_paths(path: Path) -> list[Path]:
    """Where gRPC listens for the workers that serve at a path."""
    folder = LocalSocket(path.with_name("other"), "")
    folder.close()
    prefix = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    return list(folder.inner_path.parent.parent.glob(f"leasehold-{prefix}-*/grpc"))


def test_who_goes_round_the_socket_is_refused(serve: Serve, path: Path) -> None:
    worker = serve()
    (inner,) = inner_paths(path)
    assert stat.S_IMODE(inner.parent.stat().st_mode) == 0o700
    with grpc.insecure_channel(f"unix:{inner}") as channel:
        for call in (
            lambda stub: stub.List(local_service_pb2.ListRequest(), timeout=5),
            lambda stub: stub.Release(local_service_pb2.ReleaseRequest(workload="w"), timeout=5),
            lambda stub: next(iter(stub.Claim(local_service_pb2.ClaimRequest(), timeout=5))),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(LocalServiceStub(channel))  # type: ignore[no-untyped-call]
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert worker.stop() == 0
    assert not inner.parent.exists()


def test_nothing_of_the_worker_can_be_connected_to_by_everybody(serve: Serve, path: Path) -> None:
    """The kernel asks nobody who connects to an abstract name."""
    worker = serve()
    listening = re.compile(r"^\S+ \S+ \S+ 00010000 \S+ \S+ (\d+) (\S+)", re.MULTILINE)
    names = dict(listening.findall(Path("/proc/net/unix").read_text()))
    descriptors = Path(f"/proc/{worker.process.pid}/fd")
    links = []
    for entry in descriptors.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(entry))
    own = (re.fullmatch(r"socket:\[(\d+)\]", coordinator_session) for coordinator_session in links)
    found = {names[match[1]] for match in own if match and match[1] in names}
    assert found == {str(path), str(inner_paths(path)[0])}


def test_the_folder_of_a_start_that_was_killed_is_removed_by_the_next(serve: Serve, path: Path) -> None:
    first = serve()
    (before,) = inner_paths(path)
    first.kill()
    assert before.parent.exists()
    serve(state="state2")
    (after,) = inner_paths(path)
    assert after != before
    assert not before.parent.exists()


FLOOD = f"""{BECOME}
import socket, time
connections = []
for _ in range(int(name)):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connections.append(connection)
print("connected", flush=True)
time.sleep(1000)
"""
"""Connects often, and says nothing."""


@pytest.mark.long
@needs_root
def test_one_user_does_not_take_all_connections(serve: Serve, path: Path) -> None:
    worker = serve(f'socket_group = "{GROUP}"')
    command = [sys.executable, "-c", FLOOD, str(path), f"{NOBODY},1", str(CONNECTIONS_LIMIT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdout is not None
        try:
            assert flood.stdout.readline() == "connected\n"
            assert ask(path, 0, 0) == "0 GPUs"
            assert ask(path, 2, 1) == "0 GPUs"
            assert ask(path, NOBODY, 1) == "no worker"
            log = worker.log.read_text()
            assert log.count(f"user nobody has {USER_CONNECTIONS_LIMIT} local connections") == 1
        finally:
            flood.kill()
    deadline = time.monotonic() + 30
    while ask(path, NOBODY, 1) != "0 GPUs":
        assert time.monotonic() < deadline


HEADERS = f"""{BECOME}
import threading
silence = threading.Event()
def nothing():
    silence.wait()
    yield from ()
options = [("grpc.use_local_subchannel_pool", 1)]
channels = [grpc.insecure_channel("unix:" + path, options=options) for _ in range(int(name))]
calls = [
    channel.stream_unary("/leasehold.local.v1.LocalService/Release").future(nothing())
    for channel in channels for _ in range({STREAMS_LIMIT})
]
ended = threading.Event()
for call in calls:
    call.add_done_callback(lambda _: ended.set())
ended.wait(30)
first = next(call for call in calls if call.done())
print(first.code().name, first.details(), flush=True)
sys.stdin.read()
os._exit(0)
"""
"""Opens calls on many connections, and never says what it asks."""


@pytest.mark.long
@needs_root
def test_one_user_does_not_take_all_calls(serve: Serve, path: Path) -> None:
    serve(f'socket_group = "{GROUP}"')
    connections = (CLAIMS_LIMIT + KERNELS_LIMIT + OTHER_CALLS_LIMIT) // STREAMS_LIMIT + 8
    command = [sys.executable, "-c", HEADERS, str(path), f"{NOBODY},1", str(connections)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdout is not None
        try:
            said = flood.stdout.readline()
            assert ask(path, 0, 0) == "0 GPUs"
            assert ask(path, 2, 1) == "0 GPUs"
        finally:
            flood.kill()
    assert said.startswith("RESOURCE_EXHAUSTED user nobody has"), said


def test_as_many_descriptors_as_the_host_allows_are_used(serve: Serve, path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        worker = serve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = resource.prlimit(worker.process.pid, resource.RLIMIT_NOFILE)
    assert found == (min(hard, LIMIT), hard)


def test_a_connection_for_which_descriptors_lack_ends_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = LocalSocket(path, "")
    trio_socket = trio.socket.socket
    calls = count()

    def lack(*arguments: int) -> trio.socket.SocketType:
        if 1 <= next(calls) <= 3:  # after the listener's
            raise OSError(24, "Too many open files")
        return trio_socket(*arguments)

    monkeypatch.setattr("trio.socket.socket", lack)
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for client in clients:
            client.connect(str(path))
        assert len(trio.run(found_peers, taken)) == 1
        assert [client.recv(1) for client in clients[:3]] == [b""] * 3
    taken.close()
    failed = f"a local connection of user {os.geteuid()} failed: [Errno 24] Too many open files"
    assert caplog.text.count(failed) == 1, "a user could fill the log"


LEAVE_CONNECTION = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
if os.fork():
    os._exit(0)
os.setsid()
print(connection.recv(1), flush=True)
"""
"""Connects, and leaves the connection to another process, which says what it reads of it."""


def test_who_connects_and_ends_in_a_loop_has_one_line_in_the_log(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = LocalSocket(path, "")
    command = [sys.executable, "-c", LEAVE_CONNECTION, str(path)]
    with contextlib.ExitStack() as opened:
        gone = [opened.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(5)]
        assert [process.wait(30) for process in gone] == [0] * 5

        async def reject() -> None:
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(taken.run)
                    for process in gone:
                        assert process.stdout is not None
                        assert await trio.to_thread.run_sync(process.stdout.readline) == b"b''\n"
                    nursery.cancel_scope.cancel()

        trio.run(reject)
    taken.close()
    assert caplog.text.count("from a process that has ended") == 1


@needs_root
def test_a_process_is_not_taken_for_the_one_that_had_its_pid(path: Path) -> None:
    """The kernel is told which pid to use next."""
    taken = LocalSocket(path, "")
    reused = None
    command = [sys.executable, "-c", LEAVE_CONNECTION, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as gone:
        try:
            assert gone.wait(30) == 0
            for _ in range(100):
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(gone.pid - 1))
                reused = subprocess.Popen(["sleep", "1000"])
                if reused.pid == gone.pid:
                    break
                reused.kill()
                reused.wait()
            assert reused is not None
            if reused.pid != gone.pid:
                pytest.skip("the pid can't be had")
            assert gone.stdout is not None
            assert trio.run(is_let_in, taken, gone.stdout) is False
        finally:
            if reused is not None:
                reused.kill()
                reused.wait()
            taken.close()


async def found_peers(local_socket: LocalSocket) -> list[Peer]:
    """Whom a socket takes for its peers; one of them is there, and gRPC is not."""
    found: list[Peer] = []
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            with trio.socket.socket(socket.AF_UNIX) as listener:
                await listener.bind(str(local_socket.inner_path))
                listener.listen(1)
                nursery.start_soon(local_socket.run)
                connection, name = await listener.accept()
                connection.close()
                peer = local_socket.peer(f"unix-abstract:{name[1:].decode()}")
                assert peer is not None
                found.append(peer)
                nursery.cancel_scope.cancel()
    return found


async def is_let_in(local_socket: LocalSocket, told: IO[bytes]) -> bool:
    """Whether a connection comes through, or is closed at once, as who holds it tells."""
    outcomes: list[bool] = []
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def see_it_come(listener: trio.socket.SocketType) -> None:
                connection, _ = await listener.accept()
                connection.close()
                outcomes.append(True)
                nursery.cancel_scope.cancel()

            with trio.socket.socket(socket.AF_UNIX) as listener:
                await listener.bind(str(local_socket.inner_path))
                listener.listen(1)
                nursery.start_soon(see_it_come, listener)
                nursery.start_soon(local_socket.run)
                assert await trio.to_thread.run_sync(told.readline, abandon_on_cancel=True) == b"b''\n"
                outcomes.append(False)
                nursery.cancel_scope.cancel()
    return outcomes[0]


def test_a_directory_of_users_that_hangs_holds_up_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "DIRECTORY_TIMEOUT_S", 60.0)  # longer than the peers are waited for
    released = threading.Event()
    first = iter([True])

    def ask_directory(uid: int | None) -> str:
        if next(first, False):
            released.wait(60)  # longer than the peers are waited for
        return str(uid)

    monkeypatch.setattr(unix_socket, "user_name", ask_directory)
    taken = LocalSocket(path, "")
    with socket.socket(socket.AF_UNIX) as held_up, socket.socket(socket.AF_UNIX) as second:
        held_up.connect(str(path))
        second.connect(str(path))
        try:
            assert len(trio.run(found_peers, taken)) == 1
        finally:
            released.set()
    taken.close()


def test_who_connects_itself_is_known(path: Path) -> None:
    taken = LocalSocket(path, "")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        found = trio.run(found_peers, taken)
    taken.close()
    assert [peer.identity for peer in found] == [identify(os.getpid())]


def test_without_a_pidfd_a_pid_must_fit_user_and_time() -> None:
    now, uid, itself = time.clock_gettime(time.CLOCK_BOOTTIME), os.geteuid(), identify(os.getpid())
    assert by_credentials(os.getpid(), uid, now) == itself
    assert by_credentials(os.getpid(), uid + 1, now) is None
    assert by_credentials(0, uid, now) is None
    with subprocess.Popen(["sleep", "1000"]) as younger:
        assert by_credentials(younger.pid, uid, now - 1) is None
        assert by_credentials(younger.pid, uid, now + 60) == identify(younger.pid)
        younger.kill()


def test_a_socket_that_is_served_is_left_to_its_worker(serve: Serve, path: Path) -> None:
    first = serve()
    second = serve(state="state2")
    assert second.process.wait(30) == 2
    assert f"another worker serves the socket {path}" in second.log.read_text()
    first.kill()
    assert path.exists()
    third = serve(state="state2")
    assert is_served(path)
    assert third.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("name", ["-", "no-such-group"])
def test_a_group_must_be_there(path: Path, name: str) -> None:
    with pytest.raises(StartError, match=f"{name}' does not exist on this host"):
        LocalSocket(path, name)


def test_a_path_must_be_short_and_free(path: Path) -> None:
    long = path.parent / ("x" * (PATH_LIMIT - len(str(path.parent))))
    with pytest.raises(StartError, match=f"longer than {PATH_LIMIT} bytes.*setting `socket`"):
        LocalSocket(long, "")
    path.write_text("precious")
    with pytest.raises(StartError, match=r"is not a socket: .*by the setting `socket`"):
        LocalSocket(path, "")
    assert path.read_text() == "precious"
    with pytest.raises(StartError, match=r"can't create .*\(Not a directory\)"):
        LocalSocket(path / "worker.sock", "")


def test_a_socket_that_nobody_serves_is_taken_over(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    taken = LocalSocket(path, "")
    assert facts(path) == (0o660, os.getegid())
    taken.close()
    assert not path.exists()


def test_a_socket_whose_queue_is_full_is_served_all_the_same(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        with pytest.raises(StartError, match="another worker serves"):
            LocalSocket(path, "")
