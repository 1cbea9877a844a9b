"""Who a process is, on real processes."""

import contextlib
import errno
import os
import pwd
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold_worker.driver.target_access import obstacle
from leasehold_worker.errors import OperationError
from leasehold_worker.host import process_files, process_trees, processes
from leasehold_worker.host.process_files import Pid, _read_file
from leasehold_worker.host.process_trees import ProcessTree, kill_tree, process_tree, scan_tree
from leasehold_worker.host.processes import (
    ANCESTORS_LIMIT,
    ProcessIdentity,
    catches,
    command_line,
    has_ended,
    has_variable,
    held,
    identify,
    is_alive,
    is_ending,
    is_zombie,
    lineage,
    memory_bytes,
    missing_device_nodes,
    send_signal,
    user_id,
    user_name,
    wait_ended,
    why_blocked,
    will_end,
)
from leasehold_worker.host.shared_libraries import loaded_library


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_reused_pid_is_another_process() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert is_alive(me)
    stranger = ProcessIdentity(me.pid, me.start_time_ticks - 1)
    assert not is_alive(stranger)
    with held(stranger) as pidfd:
        assert pidfd is None


def test_a_stranger_is_never_signalled() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identify(child.pid)
        assert identity is not None
        send_signal(ProcessIdentity(identity.pid, identity.start_time_ticks + 1), signal.SIGKILL)
        assert child.poll() is None
        send_signal(identity, signal.SIGKILL)
        child.wait(timeout=10)


def test_a_held_process_shows_its_end() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identify(child.pid)
        assert identity is not None
        with held(identity) as pidfd:
            assert pidfd is not None
            assert not has_ended(pidfd)
            child.kill()
            wait_until(lambda: has_ended(pidfd))


CORE_PATTERN = Path("/proc/sys/kernel/core_pattern").read_text()

DUMPS_CORE = """
import mmap, resource
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
memory = bytearray(b"x" * (64 << 20))
print("ready", flush=True)
input()
"""


@pytest.mark.skipif(CORE_PATTERN.startswith("|"), reason="another program takes the core dumps of this host")
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY, reason="core dumps are limited"
)
def test_a_process_that_writes_its_core_dump_is_ending(tmp_path: Path) -> None:
    program = [sys.executable, "-c", DUMPS_CORE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, cwd=tmp_path, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        identity = identity_of(child)
        assert not trio.run(will_end, identity, 0)
        child.send_signal(signal.SIGSEGV)
        wait_until(lambda: is_ending(child.pid))
        assert trio.run(will_end, identity, 0)


def start_sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """This process can open nothing more meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_that_can_not_be_held_is_not_taken_for_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identity_of(child)
        with no_descriptors_left(), pytest.raises(OperationError, match="Too many open files") as raised:
            send_signal(identity, signal.SIGKILL)
        assert raised.value.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
        assert child.poll() is None
        child.kill()


async def test_the_end_of_a_process_is_waited_for_while_descriptors_are_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("leasehold_worker.host.processes.HOLD_AGAIN_S", 0.01)
    with start_sleeper() as child:
        identity = identity_of(child)
        seen: list[int | None] = []

        async def watch() -> None:
            await wait_ended(identity)
            seen.append(child.poll())

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                with no_descriptors_left():
                    nursery.start_soon(watch)
                    while not caplog.records and not seen:  # noqa: ASYNC110 - the log is all that tells
                        await trio.sleep(0.001)
                assert not seen, "a live process was taken for ended"
                child.kill()
                child.wait()
        assert seen == [-signal.SIGKILL]


def test_the_tree_holds_children_and_orphans_of_the_session() -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "if os.fork() == 0:\n"
        "    orphan = subprocess.Popen(['sleep', '60'])\n"
        "    print(child.pid, orphan.pid, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as root:
        assert root.stdout is not None
        child, orphan = map(int, root.stdout.readline().split())
        identity = identify(root.pid)
        assert identity is not None
        wait_until(lambda: {i.pid for i in process_tree(identity)} == {root.pid, child, orphan})
        assert process_tree(ProcessIdentity(identity.pid, 1)) == []
        os.killpg(root.pid, signal.SIGKILL)
        root.wait(timeout=10)
        wait_until(lambda: process_tree(identity) == [])


def test_a_session_of_an_ended_leader_counts_for_its_user_only() -> None:
    """The kernel may have given the number to the session of another program meanwhile."""
    script = "sleep 60 >&- & echo $!"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as leader:
        orphan = int(leader.communicate(timeout=30)[0])
    try:
        root = ProcessIdentity(Pid(leader.pid), 1)
        assert [each.pid for each in scan_tree(root, mark_uid=os.getuid()).processes] == [orphan]
        assert not scan_tree(root, mark_uid=os.getuid() + 1).processes
        assert not scan_tree(root).processes
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_stopped_process_is_blocked() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identify(child.pid)
        assert identity is not None
        assert why_blocked(identity) is None
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: why_blocked(identity) == "stopped by a signal")
        child.kill()


def test_an_entry_that_is_not_for_us_is_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    me, mine = identify(os.getpid()), _read_file
    assert me is not None
    with start_sleeper() as child:
        hidden = identity_of(child)

        def refuse(path: str) -> bytes:
            if path.startswith(f"/proc/{child.pid}/"):
                raise PermissionError(errno.EPERM, "hidepid")
            return mine(path)

        monkeypatch.setattr(process_files, "_read_file", refuse)
        assert identify(child.pid) is None
        assert command_line(child.pid) == []
        assert user_id(child.pid) is None
        assert hidden not in scan_tree(me, "NAME=value").processes
        child.kill()


def test_a_scan_soon_after_another_reads_new_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    me, mine = identify(os.getpid()), _read_file
    assert me is not None
    read: list[str] = []

    def note(path: str) -> bytes:
        read.append(path)
        return mine(path)

    monkeypatch.setattr(process_files, "_read_file", note)
    monkeypatch.setattr(process_trees, "FRESH_S", 60.0)
    with start_sleeper() as old:
        first = scan_tree(me)
        read.clear()
        with start_sleeper() as new:
            second = scan_tree(me, known=first)
            assert identity_of(new) in second.processes
            assert f"/proc/{new.pid}/stat" in read
            assert f"/proc/{old.pid}/stat" not in read
            new.kill()
        old.kill()
        old.wait()
        assert old.pid not in [each.pid for each in scan_tree(me, known=second).processes]
        read.clear()
        monkeypatch.setattr(process_trees, "FRESH_S", 0.0)
        scan_tree(me, known=second)
        assert f"/proc/{me.pid}/stat" in read


def test_a_host_that_is_short_of_descriptors_says_nothing_of_a_process() -> None:
    me = identify(os.getpid())
    assert me is not None
    with no_descriptors_left():
        with pytest.raises(OSError, match="Too many open files"):
            is_alive(me)
        with pytest.raises(OSError, match="Too many open files"):
            process_tree(me)


def test_the_name_of_a_user_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        if len(asked) == 1:
            raise KeyError(uid)
        return pwd.struct_passwd(("somebody", "", uid, uid, "", "", ""))

    monkeypatch.setattr(pwd, "getpwuid", ask)
    uid = 2**31 - 7
    assert [user_name(uid) for _ in range(3)] == [str(uid), "somebody", "somebody"]
    assert len(asked) == 2


def test_facts() -> None:
    assert identify(2**22 + 1) is None
    assert (memory_bytes("MemTotal") or 0) > 2**20
    assert memory_bytes("NoSuchField") is None
    assert Pid(1) == 1


def test_a_thread_is_no_process() -> None:
    me, ready, done = os.getpid(), threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert ready.wait(10)
        assert thread.native_id is not None
        assert identify(thread.native_id) is None
        with held(ProcessIdentity(Pid(thread.native_id), 1)) as pidfd:
            assert pidfd is None
        assert identify(me) is not None
    finally:
        done.set()
        thread.join()


def start_python(program: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts a program, and waits until it has written a byte."""
    arguments = [
        sys.executable,
        "-c",
        f"import os, signal, time; {program}; os.write(1, b'.'); time.sleep(60)",
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"."
    return process


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    identity = identify(process.pid)
    assert identity is not None
    return identity


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_who_handles_a_signal() -> None:
    handling = start_python("signal.signal(signal.SIGTERM, print)")
    plain = start_python("signal.signal(signal.SIGTERM, signal.SIG_DFL)")
    try:
        assert catches(identity_of(handling), signal.SIGTERM)
        assert not catches(identity_of(plain), signal.SIGTERM)
    finally:
        end(handling)
        end(plain)


def test_a_device_node_that_only_the_host_has(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a process another root")
    inside = start_python(f"os.chroot({str(tmp_path)!r})")
    outside = start_python("0")
    nodes = ["/dev/null", "/dev/nvidia-that-nobody-has"]
    try:
        assert missing_device_nodes(identity_of(inside), nodes) == ["/dev/null"]
        assert missing_device_nodes(identity_of(outside), nodes) == []
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/null").touch()
        assert missing_device_nodes(identity_of(inside), nodes) == []
    finally:
        end(inside)
        end(outside)


def test_what_a_process_was_started_with() -> None:
    process = start_python("0", env={**os.environ, "CUDA_CHECKPOINT_JOB_FILE": "/proc/1/fd/3"})
    try:
        assert has_variable(identity_of(process), "CUDA_CHECKPOINT_JOB_FILE")
        assert not has_variable(identity_of(process), "CUDA_CHECKPOINT_JOB")
    finally:
        end(process)


def test_the_libraries_of_a_process() -> None:
    libc = loaded_library(os.getpid(), "libc.so")
    assert libc is not None
    child = start_python("0")
    try:
        assert loaded_library(child.pid, "libc.so") == libc
        assert loaded_library(child.pid, "libcuda.so") is None
    finally:
        end(child)


@pytest.fixture
def headless() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose first thread has ended, and which lives on by another."""
    program = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
os.write(1, b".")
ctypes.CDLL(None).pthread_exit(None)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "LEASEHOLD_TEST": "me"}
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"."
    wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    yield process
    end(process)


async def test_a_process_lives_on_when_its_first_thread_has_ended(headless: subprocess.Popen[bytes]) -> None:
    identity = identity_of(headless)
    assert is_alive(identity)
    assert not is_zombie(identity.pid)
    assert process_tree(identity) == [identity]
    assert next(each for each, _ in lineage(headless.pid)) == identity
    assert command_line(headless.pid)[0] == sys.executable
    assert has_variable(identity, "LEASEHOLD_TEST")
    assert loaded_library(headless.pid, "libc.so") == loaded_library(os.getpid(), "libc.so")
    assert missing_device_nodes(identity, ["/dev/null"]) == []
    assert obstacle(headless.pid) is None
    assert why_blocked(identity) is None
    assert not is_ending(identity.pid)
    send_signal(identity, signal.SIGSTOP)
    wait_until(lambda: why_blocked(identity) == "stopped by a signal")
    with held(identity) as pidfd:
        assert pidfd is not None
        assert not has_ended(pidfd)
        send_signal(identity, signal.SIGKILL)
        wait_until(lambda: has_ended(pidfd))
    assert not is_alive(identity)
    assert is_zombie(identity.pid)


@pytest.mark.parametrize("patience_s", [0, 5])
def test_a_scan_that_misses_an_environment_lists_again_or_is_not_complete(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a chain of forks can end between the listing and the reading of its environment."""
    mark = "LEASEHOLD_WORKLOAD_ID=w-chain"
    name, _, value = mark.partition("=")
    root = identify(os.getpid())
    assert root is not None
    root = ProcessIdentity(Pid(2**22 + 1), root.start_time_ticks)
    with contextlib.ExitStack() as running:

        def start() -> subprocess.Popen[bytes]:
            started = subprocess.Popen(["sleep", "1000"], env={**os.environ, name: value})
            running.enter_context(started)
            running.callback(started.kill)
            return started

        links = [start()]
        read = processes.has_real_user

        def end_first(pid: int, uid: int | None) -> bool:
            if pid == links[0].pid and len(links) == 1:
                links.append(start())
                links[0].kill()
                links[0].wait()
            return read(pid, uid)

        monkeypatch.setattr("leasehold_worker.host.process_trees.has_real_user", end_first)
        tree = scan_tree(root, mark, mark_uid=os.getuid(), patience_s=patience_s)
        assert len(links) == 2
        assert [identity.pid for identity in tree.processes] == ([links[1].pid] if patience_s else [])
        assert tree.complete == bool(patience_s)


def test_a_process_that_ended_before_it_was_read_may_have_had_a_mark_and_a_child() -> None:
    gone = ProcessIdentity(Pid(2**22 + 1), 0)
    with subprocess.Popen(["true"]) as ended:
        wait_until(lambda: processes.is_zombie(ended.pid))
        uid = os.getuid()
        assert not scan_tree(gone, "MARK=ended", mark_uid=uid).complete
        assert scan_tree(gone, "MARK=ended", mark_uid=uid, patience_s=5).complete, (
            "the second listing has all"
        )
        assert not scan_tree(gone, "MARK=ended", mark_uid=uid).processes


def test_a_group_that_was_listed_long_ago_is_killed_only_while_a_process_of_the_tree_is_in_it() -> None:
    """A workload can delay the search for marked processes, and end meanwhile: others get its ids."""
    with contextlib.ExitStack() as running:
        member, stranger = (
            running.enter_context(subprocess.Popen(["sleep", "1000"], process_group=0)) for _ in range(2)
        )
        running.callback(stranger.kill)
        running.callback(member.kill)
        long_ago = time.monotonic() - 1
        ours = identity_of(member)
        kill_tree(ProcessTree((ours,), frozenset({stranger.pid}), complete=True, listed_s=long_ago))
        assert member.wait(10) == -signal.SIGKILL
        assert identify(stranger.pid) is not None
        mine = identity_of(stranger)
        group = frozenset({stranger.pid})
        kill_tree(ProcessTree((mine,), group, complete=True, listed_s=long_ago))
        assert stranger.wait(10) == -signal.SIGKILL


FORKS = """
import os, sys
print("begun", flush=True)
while True:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_processes_of_others_that_come_and_go_keep_no_scan_from_its_end() -> None:
    gone = ProcessIdentity(Pid(2**22 + 1), 0)
    with contextlib.ExitStack() as running:
        for _ in range(2):
            storm = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE)
            running.enter_context(storm)
            running.callback(storm.kill)
            assert storm.stdout is not None
            storm.stdout.readline()
        scans = [scan_tree(gone, "A=nobody-s", mark_uid=os.getuid(), patience_s=10) for _ in range(10)]
    assert sum(scan.complete for scan in scans) >= 8


def test_a_mark_of_several_variables_is_that_of_processes_with_all_of_them() -> None:
    """Workers of one host may have workloads of the same id, and have sockets of their own."""
    both = {"LEASEHOLD_WORKLOAD_ID": "w-same", "LEASEHOLD_SOCKET": "/one/worker.sock"}
    mark = "\0".join(f"{name}={value}" for name, value in both.items())
    other = both | {"LEASEHOLD_SOCKET": "/two/worker.sock"}
    me = identify(os.getpid())
    assert me is not None
    root = ProcessIdentity(Pid(2**22 + 1), me.start_time_ticks)
    with contextlib.ExitStack() as running:
        marked, stranger = (
            running.enter_context(subprocess.Popen(["sleep", "1000"], env=os.environ | variables))
            for variables in (both, other)
        )
        running.callback(stranger.kill)
        running.callback(marked.kill)
        found = scan_tree(root, mark, mark_uid=os.getuid(), patience_s=5).processes
    assert [identity.pid for identity in found] == [marked.pid]


EXECUTING = """
import os, sys
environment = {"MARK": os.environ["MARK"]} | {f"E{number}": "" for number in range(100_000)}
os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
"""
"""A program that starts itself again and again, with an environment that takes the kernel some time."""


def test_a_process_within_execve_is_found_or_the_tree_is_not_complete() -> None:
    me = identify(os.getpid())
    assert me is not None
    root = ProcessIdentity(Pid(2**22 + 1), me.start_time_ticks)
    has_missed = False
    program = [sys.executable, "-ISE", "-c", EXECUTING]
    mark = str(me)  # another run of this test has another one
    with subprocess.Popen(program, env={"MARK": mark}) as executing:
        try:
            while not has_missed:
                tree = scan_tree(root, f"MARK={mark}", mark_uid=os.getuid())
                found = [identity.pid for identity in tree.processes]
                assert found == [executing.pid] or not tree.complete
                has_missed = not found
        finally:
            executing.kill()


def test_an_environment_that_is_empty_for_good_is_read() -> None:
    with subprocess.Popen(["sleep", "1000"], env={}) as bare:
        try:
            wait_until(lambda: command_line(bare.pid) == ["sleep", "1000"])
            assert processes.has_entries(bare.pid, "MARK=bare") is False
        finally:
            bare.kill()
    assert processes.has_entries(2, "MARK=bare") is False, "a thread of the kernel"


LARGE = """
import ctypes, mmap, sys, time

libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
size = 2**28
start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
places = [int(fields[number]) for number in (23, 24, 42, 43, 44)] + [libc.sbrk(0), int(fields[25])]
parts = (ctypes.c_uint64 * 13)(*places, *[start, start + size] * 2, 0, 0xFFFFFFFF << 32)  # prctl_mm_map
if libc.prctl(35, 14, ctypes.byref(parts), ctypes.sizeof(parts), 0):  # PR_SET_MM, PR_SET_MM_MAP
    sys.exit(f"PR_SET_MM: {ctypes.get_errno()}")
print(".", flush=True)
time.sleep(1000)
"""
"""A program whose arguments and environment are 256 MiB of its memory, which cost it nothing."""


def test_a_large_environment_is_not_read_whole() -> None:
    process = subprocess.Popen([sys.executable, "-c", LARGE], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.read(1) != b".":
            pytest.skip(process.stderr.read().decode())  # a kernel without CONFIG_CHECKPOINT_RESTORE
        for name in ("environ", "cmdline"):
            assert len(process_files.read_process_file(process.pid, name)) == process_files.READ_LIMIT
        assert len(command_line(process.pid)) <= processes.COMMAND_LINE_LIMIT
        assert processes.variable_of(process.pid, "PATH") == ""
    finally:
        end(process)


DESCEND = """
import os, signal, sys
for _ in range(int(sys.argv[1])):
    if os.fork():
        signal.pause()
os.write(1, b"%d\\n" % os.getpid())
signal.pause()
"""
"""Forks a chain of so many processes, and prints the last one's pid."""


def test_only_the_next_ancestors_of_a_process_are_read() -> None:
    """A user may have chains of 100,000 processes, of which each takes 30 µs."""
    command = [sys.executable, "-c", DESCEND, str(ANCESTORS_LIMIT + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as chain:
        assert chain.stdout is not None
        try:
            last = int(chain.stdout.readline())
            found = [identity.pid for identity, _ in lineage(last)]
        finally:
            os.killpg(chain.pid, signal.SIGKILL)
    assert len(found) == ANCESTORS_LIMIT + 1
    assert found[0] == last
    assert chain.pid not in found
