"""Who a process is, on real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from leasehold_worker.processes import (
    Pid,
    ProcessIdentity,
    has_ended,
    held,
    identify,
    is_alive,
    memory_bytes,
    process_tree,
    send_signal,
    why_blocked,
)


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


def test_a_stopped_process_is_blocked() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identify(child.pid)
        assert identity is not None
        assert why_blocked(identity) is None
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: why_blocked(identity) == "stopped by a signal")
        child.kill()


def test_facts() -> None:
    assert identify(2**22 + 1) is None
    assert (memory_bytes("MemTotal") or 0) > 2**20
    assert memory_bytes("NoSuchField") is None
    assert Pid(1) == 1
