"""The socket of the local API: who is let in, and how a worker takes it over."""

import grp
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from leasehold.v1 import local_pb2
from leasehold.v1.local_pb2_grpc import LocalServiceStub
from leasehold_client.local import LocalWorker, NoWorkerError
from leasehold_worker.errors import StartError
from leasehold_worker.local_socket import PATH_LIMIT, LocalSocket

from .conftest import WorkerProcess

NOBODY = 65534
GROUP = grp.getgrgid(1).gr_name

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

BECOME = """
import os, sys
from leasehold_client import local, local_claim
from leasehold_client.errors import LeaseholdError
path, ids, name = sys.argv[1:]
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
    except NoWorkerError:
        return False
    return True


def ask(path: Path, *ids: int, release: str = "") -> str:
    """What the worker answers a user, by number, who is in groups."""
    arguments = [str(path), ",".join(map(str, ids)), release]
    done = subprocess.run(
        [sys.executable, "-c", ASK, *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def facts(path: Path) -> tuple[int, int]:
    found = path.stat()
    return stat.S_IMODE(found.st_mode), found.st_gid


@needs_root
def test_the_worker_s_user_its_group_and_root_are_let_in(serve: Serve, path: Path) -> None:
    worker = serve(f'socket_group = "{GROUP}"')
    assert facts(path) == (0o660, 1)
    assert ask(path, NOBODY, NOBODY) == "no worker"
    assert ask(path, NOBODY, NOBODY, 1) == "no worker", "supplementary groups are those of the user's entry"
    assert ask(path, NOBODY, 1) == "0 GPUs"
    path.chmod(0o666)  # the worker asks the kernel besides
    assert ask(path, NOBODY, NOBODY) == "no worker"
    assert ask(path, 0, NOBODY) == "0 GPUs"
    log = worker.log.read_text()
    assert re.search(r"process \d+ of user nobody may not connect, and was refused", log), log
    assert worker.stop() == 0
    assert not path.exists()


@needs_root
def test_a_claim_is_released_by_its_user_the_worker_s_and_root_only(serve: Serve, path: Path) -> None:
    serve(f'socket_group = "{GROUP}"')
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


def test_who_goes_round_the_socket_is_refused(serve: Serve) -> None:
    serve()
    names = set(re.findall(r"@(leasehold-[0-9a-f]{32})$", Path("/proc/net/unix").read_text(), re.MULTILINE))
    codes = set()
    for name in names:
        with grpc.insecure_channel(f"unix-abstract:{name}") as channel:
            for call in (
                lambda stub: stub.List(local_pb2.ListRequest(), timeout=5),
                lambda stub: stub.Release(local_pb2.ReleaseRequest(workload="w"), timeout=5),
                lambda stub: next(iter(stub.Claim(local_pb2.ClaimRequest(), timeout=5))),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call(LocalServiceStub(channel))  # type: ignore[no-untyped-call]
                codes.add(refused.value.code())
    assert grpc.StatusCode.UNAUTHENTICATED in codes
    assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}


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
    with pytest.raises(StartError, match=f"{name}' is no group of this host"):
        LocalSocket(path, name)


def test_a_path_must_be_short_and_free(path: Path) -> None:
    long = path.parent / ("x" * (PATH_LIMIT - len(str(path.parent))))
    with pytest.raises(StartError, match=f"more than {PATH_LIMIT} bytes.*`socket` in its settings"):
        LocalSocket(long, "")
    path.write_text("precious")
    with pytest.raises(StartError, match=r"is no socket: give .*`socket` in its settings"):
        LocalSocket(path, "")
    assert path.read_text() == "precious"
    with pytest.raises(StartError, match=r"can't be made \(File exists\)"):
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
