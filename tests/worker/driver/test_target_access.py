"""The access of the driver helper to processes of other users, by what the kernel reports."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.worker.unix_users import ALICE_UID, WORKER_UID, as_user, is_readable, needs_root

pytestmark = needs_root

ACCESS = """
import ctypes, json, sys
from functools import partial
from pathlib import Path
from leasehold_worker.driver.helper import die_with
from leasehold_worker.driver.target_access import file_system_user_of, obstacle

def look():
    signal_at_death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal_at_death))  # PR_GET_PDEATHSIG
    status = Path("/proc/thread-self/status").read_text()
    users = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
    why = obstacle(int(sys.argv[1]))
    return {"users": list(map(int, users)), "signal": signal_at_death.value, "obstacle": why}

keep_signal = partial(die_with, int(sys.argv[2]))
keep_signal()
found = [look()]
with file_system_user_of(int(sys.argv[1]), keep_signal):
    found.append(look())
print(json.dumps([*found, look()]))
"""
UNDUMPABLE = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); input()"
DUMPABLE = "print(flush=True); input()"


@contextmanager
def target(program: str = DUMPABLE, uid: int = ALICE_UID) -> Iterator[int]:
    """A process of a user. Skips the test if other users can't run such processes."""
    if not is_readable():
        pytest.skip("other users can't read this checkout and its interpreter")
    command = [*as_user(uid), sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process.pid
        process.kill()


def access(pid: int, *capabilities: str) -> list[dict[str, object]]:
    """The users, the signal at the parent's death and the obstacle of a helper: before, during and after."""
    command = [*as_user(WORKER_UID, *capabilities), sys.executable, "-c", ACCESS, str(pid), str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("uid", [ALICE_UID, 0])
def test_a_helper_is_the_file_system_user_of_its_target_during_a_call(uid: int) -> None:
    with target(uid=uid) as pid:
        before, during, after = access(pid, "sys_ptrace", "setuid", "chown")
    assert during == {"users": [*[WORKER_UID] * 3, uid], "signal": signal.SIGKILL, "obstacle": None}
    assert before == after
    assert (after["users"], after["signal"]) == ([WORKER_UID] * 4, signal.SIGKILL)
    assert f"it belongs to user id {uid}" in str(after["obstacle"])


def test_the_target_of_the_own_user_needs_no_change() -> None:
    with target(uid=WORKER_UID) as pid:
        found = access(pid, "sys_ptrace", "setuid")
    assert found == [{"users": [WORKER_UID] * 4, "signal": signal.SIGKILL, "obstacle": None}] * 3


def test_a_helper_of_root_opens_no_file_of_root_for_its_target() -> None:
    """A hostile target puts a file that it may only read in the place of its pipe."""
    program = ACCESS.replace(
        "    found.append(look())", "    found.append(look()); open('/etc/passwd', 'r+')"
    )
    with target() as pid:
        command = [sys.executable, "-c", program, str(pid), str(os.getpid())]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        allowed = subprocess.run(
            [sys.executable, "-c", ACCESS, str(pid), str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "PermissionError" in refused.stderr
    before, during, after = json.loads(allowed.stdout)
    assert during == {"users": [0, 0, 0, ALICE_UID], "signal": signal.SIGKILL, "obstacle": None}
    assert before == after == {"users": [0] * 4, "signal": signal.SIGKILL, "obstacle": None}


@pytest.mark.parametrize(
    ("capabilities", "remedy"),
    [
        (("sys_ptrace",), "with CAP_SYS_PTRACE and CAP_SETUID"),
        pytest.param(
            ("sys_ptrace", "dac_read_search"), "with CAP_SYS_PTRACE and CAP_SETUID", marks=pytest.mark.long
        ),
        pytest.param((), "with CAP_SYS_PTRACE and CAP_SETUID", marks=pytest.mark.long),
        (("setuid",), "tracing it is not permitted .* with CAP_SYS_PTRACE"),
        pytest.param(
            ("dac_override",), "tracing it is not permitted .* with CAP_SYS_PTRACE", marks=pytest.mark.long
        ),
    ],
)
def test_the_missing_capability_is_named(capabilities: tuple[str, ...], remedy: str) -> None:
    with target() as pid:
        _, during, _ = access(pid, *capabilities)
    assert re.search(remedy, str(during["obstacle"]))


def test_a_target_that_is_not_dumpable_is_refused() -> None:
    """Its files belong to root, and its pipes to its user. No one file-system user can open both."""
    with target(UNDUMPABLE) as pid:
        _, during, _ = access(pid, "sys_ptrace", "setuid")
    assert "it is not dumpable" in str(during["obstacle"])


def test_a_helper_in_a_call_can_not_be_signalled_by_the_user_of_its_target() -> None:
    program = ACCESS.replace("    found.append(look())", "    print(flush=True); input()")
    with target() as pid:
        command = [*as_user(WORKER_UID, "sys_ptrace", "setuid"), sys.executable, "-c", program]
        with subprocess.Popen(
            [*command, str(pid), str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as helper:
            assert helper.stdout is not None
            assert helper.stdout.readline()
            kill = [*as_user(ALICE_UID), "sh", "-c", f"kill -0 {helper.pid}; cat /proc/{helper.pid}/environ"]
            refused = subprocess.run(kill, capture_output=True, text=True, check=False)
            helper.kill()
    assert refused.stderr.count("not permitted") == 1
    assert refused.stderr.count("Permission denied") == 1
