"""Programs and hooks get none of the capabilities of a worker that runs without root."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from leasehold_worker.hooks import hook_child
from leasehold_worker.programs import shim
from leasehold_worker.programs.child_input import child_input
from leasehold_worker.programs.interpreter import module_command
from leasehold_worker.programs.user_change import KEYCTL, KEYCTL_JOIN_SESSION_KEYRING

from tests.worker.unix_users import as_user, open_to_others

NOBODY = 65534
AMBIENT = "+sys_ptrace,+kill,+setuid,+setgid,+dac_read_search"
"""The last one lets the process read this checkout, wherever it is."""

OTHER = "2001:2002:2003,2004"
PROGRAM = ["/bin/cat", "/proc/self/status"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give capabilities away"
)


@pytest.fixture
def environment() -> Iterator[int]:
    """A descriptor with the variables of a program."""
    with child_input(f"PATH={os.environ['PATH']}".encode()) as descriptor:
        yield descriptor


def run_with_capabilities(*command: str, descriptors: tuple[int, ...] = ()) -> dict[str, list[str]]:
    """The status that a command prints, which runs as another user with ambient capabilities."""
    user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    granted = ["setpriv", *user, "--inh-caps", AMBIENT, "--ambient-caps", AMBIENT, "--"]
    done = subprocess.run(
        [*granted, *command], capture_output=True, text=True, timeout=60, check=False, pass_fds=descriptors
    )
    assert done.stdout, done.stderr
    lines = (line.partition(":") for line in done.stdout.splitlines())
    return {name: value.split() for name, _, value in lines}


def require_none(status: dict[str, list[str]]) -> None:
    """Checks that a process has no capability, now or after another exec."""
    assert {int(status[name][0], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}


def require_other(status: dict[str, list[str]]) -> None:
    """Checks that a process is the other user's, for good."""
    require_none(status)
    assert (status["Uid"], status["Gid"]) == (["2001"] * 4, ["2002"] * 4)
    assert status["Groups"] == ["2003", "2004"]
    assert status["NoNewPrivs"] == ["1"]


def status_of_program(folder: Path, environment: int, user: str) -> dict[str, list[str]]:
    """The status of a program that a shim of a worker with capabilities starts."""
    os.chown(folder, NOBODY, NOBODY)
    open_to_others(folder)
    status_read, status = os.pipe()
    settings = [str(folder), "boot", str(status), "1024", "", "", user, str(environment), "/"]
    command = [*module_command(shim.__name__), *settings, *PROGRAM]
    try:
        return run_with_capabilities(*command, descriptors=(status, environment))
    finally:
        os.close(status_read)
        os.close(status)


def status_of_hook(environment: int, user: str) -> dict[str, list[str]]:
    """The status of the program of a hook."""
    errors_read, errors = os.pipe()
    settings = [str(errors), "", user, "/", str(environment)]
    command = [*module_command(hook_child.__name__), *settings, *PROGRAM]
    try:
        return run_with_capabilities(*command, descriptors=(errors, environment))
    finally:
        os.close(errors_read)
        os.close(errors)


def test_the_worker_of_this_test_has_capabilities() -> None:
    assert int(run_with_capabilities(*PROGRAM)["CapEff"][0], 16) != 0


def test_a_program_has_no_capability(tmp_path: Path, environment: int) -> None:
    require_none(status_of_program(tmp_path, environment, ""))


def test_a_hook_has_no_capability(environment: int) -> None:
    require_none(status_of_hook(environment, ""))


def test_a_program_is_another_user_without_capabilities(tmp_path: Path, environment: int) -> None:
    require_other(status_of_program(tmp_path, environment, OTHER))


def test_a_hook_is_another_user_without_capabilities(environment: int) -> None:
    require_other(status_of_hook(environment, OTHER))


@pytest.mark.parametrize("user", ["0:2002:2002", "2001:0:2002", "2001:2002:0"])
def test_nothing_ever_becomes_root(user: str) -> None:
    code = f"from leasehold_worker.programs.user_change import take_on; take_on({user!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "never becomes root" in done.stderr


PREFERRED = """
import os, resource, sys
from leasehold_worker.programs import user_change

user_change.OOM_SCORE = sys.argv[1]  # only CAP_SYS_RESOURCE can lower the real one
os.setpriority(os.PRIO_PROCESS, 0, -5)
user_change.take_limits(sys.argv[2])
print(os.nice(0), resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NPROC)[0])
"""
"""Takes limits while the kernel prefers the process, as a worker whose unit has Nice and OOMScoreAdjust."""


def run_preferred(score: Path, limits: str) -> str:
    command = [sys.executable, "-c", PREFERRED, str(score), limits]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "PermissionError" in done.stderr:
        pytest.skip("this root lacks CAP_SYS_NICE")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("before", "after"), [("-900\n", "0"), ("300\n", "300\n")])
def test_a_program_of_another_user_is_not_preferred_as_the_worker_is(
    tmp_path: Path, before: str, after: str
) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text(before)
    assert run_preferred(score, "4:0:4096,6:20:30") == "0 (0, 4096) 20\n"
    assert score.read_text() == after


def test_a_program_of_the_workers_own_user_keeps_all(tmp_path: Path) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text("-900")
    assert run_preferred(score, "").startswith("-5 ")
    assert score.read_text() == "-900"


def test_a_limit_that_can_not_be_set_starts_nothing() -> None:
    code = "from leasehold_worker.programs.user_change import take_limits; take_limits('4:20:10')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the limit 4 of setrlimit(2) can't be 20:10" in done.stderr


KEYRING_CALLS = f"""
import ctypes, os, sys

libc = ctypes.CDLL(None)
keyctl = {KEYCTL.get(os.uname().machine, 0)}
"""
WITH_A_KEY = f"""{KEYRING_CALLS}
libc.syscall(keyctl, {KEYCTL_JOIN_SESSION_KEYRING}, None)
libc.syscall(keyctl - 2, b"user", b"secret", b"of the worker", 13, -3)  # add_key(2)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Executes a command that has a session keyring with a key."""
READ_THE_KEY = f"""{KEYRING_CALLS}
found = ctypes.create_string_buffer(100)
key = libc.syscall(keyctl, 10, -3, b"user", b"secret", 0)  # KEYCTL_SEARCH
libc.syscall(keyctl, 11, key, found, 100)  # KEYCTL_READ
print("read", found.value)
"""


@pytest.mark.parametrize(("user", "expected"), [("", "of the worker"), (OTHER, "")])
def test_a_program_of_another_user_has_no_keyring_of_the_worker(
    environment: int, user: str, expected: str
) -> None:
    interpreter = os.path.realpath(sys.executable)  # that of the checkout may be closed to other users
    # setpriv has all capabilities until its exec, so the shell tries.
    trial = [*as_user(2001), "/bin/sh", "-c", 'exec "$0" -I -S -c ""', interpreter]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"other users can't run {interpreter}")
    program = [interpreter, "-I", "-S", "-c", READ_THE_KEY]
    errors_read, errors = os.pipe()
    settings = [str(errors), "", user, "/", str(environment)]
    hook = [*module_command(hook_child.__name__), *settings, *program]
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITH_A_KEY, *hook],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            pass_fds=(environment, errors),
        )
    finally:
        os.close(errors)
        os.close(errors_read)
    if not user and "of the worker" not in done.stdout:
        pytest.skip("no keyrings here")
    assert done.stdout.strip() == f"read {expected.encode()!r}", done.stderr
