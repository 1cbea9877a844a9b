"""What an image can't hold is known beforehand, of real processes."""

import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio
from leasehold_worker.criu import dump, obstacles
from leasehold_worker.criu.image_size import image_bytes
from leasehold_worker.criu.unix_sockets import unix_peers
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import ProcessIdentity, identify

from tests.worker.criu_cases import end, wait_for


@contextmanager
def holder(code: str, *descriptors: int, session: bool = True) -> Iterator[ProcessIdentity]:
    """A program that has done something, has said so, and waits."""
    ready, tell = os.pipe()
    lines = ["import os, signal, socket, subprocess, sys", code, f"os.close({tell})", "signal.pause()"]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(*descriptors, tell),
        start_new_session=session,
    )
    os.close(tell)
    identity = identify(process.pid)
    assert identity is not None
    tree = [identity]
    try:
        os.read(ready, 1)
        assert process.poll() is None
        tree = process_tree(identity)
        yield identity
    finally:
        os.close(ready)
        for member in tree:
            end(member)
        process.wait()


@pytest.mark.parametrize(
    "code",
    [
        "",
        "pair = socket.socketpair(); child = subprocess.Popen(['sleep', '60'])",
        "ends = os.pipe(); random = open('/dev/urandom'); listening = socket.create_server(('127.0.0.1', 0))",
        "import select; poll = select.epoll()",
        (
            "a = socket.create_server(('127.0.0.1', 0));"
            " b = socket.create_connection(a.getsockname()); c = a.accept()"
        ),
        (
            "a = socket.create_server(('::', 0), family=socket.AF_INET6, dualstack_ipv6=True);"
            " b = socket.create_connection(('127.0.0.1', a.getsockname()[1])); c = a.accept()"
        ),
    ],
)
def test_what_an_image_holds_is_no_obstacle(code: str) -> None:
    with holder(code) as root:
        assert obstacles.obstacles(process_tree(root)) == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname())",
            "TCP connection to 127.0.0.1 port",
        ),
        (
            (
                "a = socket.create_server(('::1', 0), family=socket.AF_INET6);"
                " b = socket.create_connection(a.getsockname()[:2])"
            ),
            "TCP connection to ::1 port",
        ),
        (
            (
                "a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname());"
                " c = a.accept(); b.shutdown(socket.SHUT_WR)"
            ),
            "TCP connection to 127.0.0.1 port",
        ),
        ("import pty; ends = pty.openpty()", "is a terminal"),
        ("log = open('/dev/kmsg')", "/dev/kmsg is a device that CRIU may not support"),
    ],
)
def test_an_obstacle_is_named(code: str, why: str) -> None:
    if "kmsg" in code and os.geteuid() != 0:
        pytest.skip("only root opens /dev/kmsg")
    if "::1" in code and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with holder(code) as root:
        assert why in " ".join(obstacles.obstacles(process_tree(root)))


def test_a_connection_to_another_process_is_an_obstacle_and_the_only_one_of_a_stopped_tree() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"c = socket.create_connection(('127.0.0.1', {port})); import pty; pty.openpty()"
        with holder(code) as root, server.accept()[0]:
            told = " ".join(obstacles.obstacles([root]))
            only = obstacles.outside_connections([root])
    assert "is a terminal" in told
    assert len(only) == 1
    assert only[0] in told


def test_sockets_and_pipes_to_others_are_obstacles() -> None:
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    with ours, theirs, holder("", theirs.fileno(), write_end) as root, holder("", ours.fileno()):
        assert unix_peers()[os.fstat(ours.fileno()).st_ino] == os.fstat(theirs.fileno()).st_ino
        theirs.close()
        ours.close()
        os.close(write_end)
        found = " ".join(obstacles.obstacles([root]))
    os.close(read_end)
    assert "Unix socket connected to a process outside the workload" in found
    assert "pipe to a process outside the workload" in found


def test_a_stream_to_the_worker_is_an_obstacle_of_its_own() -> None:
    """Its program can't close it: an application that serves a kernel has no image."""
    ours, theirs = socket.socketpair()
    with ours, theirs, holder("", theirs.fileno()) as root:
        theirs.close()
        (told,) = obstacles.obstacles([root])
    assert "the program's stream to this worker" in told
    assert "choose stop" in told


async def test_daemons_and_programs_without_a_session_are_obstacles() -> None:
    mark = f"leasehold-daemon-{os.getpid()}"
    code = f"subprocess.run(['setsid', '--fork', 'bash', '-c', 'sleep 60; true', {mark!r}])"
    with holder(code, session=False) as root:
        await wait_for(lambda: _named(mark))
        daemons = _named(mark)
        try:
            told = " ".join(obstacles.obstacles([root, *daemons]))
        finally:
            for daemon in daemons:
                for process in process_tree(daemon):
                    end(process)
    assert "is not a descendant of the first process" in told
    assert "is not a session leader" in told


def _named(mark: str) -> list[ProcessIdentity]:
    """Shells that were given this name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().split(b"\0")
            if line[0] == b"bash" and mark.encode() in line:
                found.append(identify(int(path.parent.name)))
    return [identity for identity in found if identity is not None]


async def test_a_controlling_terminal_is_an_obstacle() -> None:
    master, slave = pty.openpty()
    process = await trio.lowlevel.open_process(["setsid", "--ctty", "sleep", "60"], stdin=slave)
    os.close(slave)
    await wait_for(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep"))
    root = identify(process.pid)
    assert root is not None
    assert "has a controlling terminal" in " ".join(obstacles.obstacles([root]))
    process.kill()
    await process.wait()
    os.close(master)


def test_large_deleted_files_are_obstacles_and_the_list_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstacles, "GHOST_BYTES", 1 << 20)
    assert dump.GHOST_BYTES == 64 << 20
    code = (
        f"os.chdir({str(tmp_path)!r})\nkept = [open(f'f{{n}}', 'w+b') for n in range(12)]\n"
        "for n, file in enumerate(kept):\n    file.truncate(2 << 20)\n    os.unlink(f'f{n}')"
    )
    with holder(code) as root:
        told = obstacles.obstacles([root])
    assert "is a deleted file of 2 MiB, and an image holds deleted files up to 1 MiB" in told[0]
    assert len(told) == 9
    assert told[-1] == "and 4 more"


def test_the_size_of_an_image_is_known_beforehand() -> None:
    with holder("") as small, holder("memory = bytes(range(1, 251)) * ((64 << 20) // 250)") as large:
        assert image_bytes([large]) - image_bytes([small]) > 60 << 20
