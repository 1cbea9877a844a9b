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

from tests.worker.unix_users import open_to_others

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
    settings = [str(folder), "boot", str(status), "1024", "", user, str(environment), "/"]
    command = [*module_command(shim.__name__), *settings, *PROGRAM]
    try:
        return run_with_capabilities(*command, descriptors=(status, environment))
    finally:
        os.close(status_read)
        os.close(status)


def status_of_hook(environment: int, user: str) -> dict[str, list[str]]:
    """The status of the program of a hook."""
    errors_read, errors = os.pipe()
    command = [*module_command(hook_child.__name__), str(errors), user, "/", str(environment), *PROGRAM]
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
    program = [sys.executable, "-I", "-S", "-c", READ_THE_KEY]
    errors_read, errors = os.pipe()
    hook = [*module_command(hook_child.__name__), str(errors), user, "/", str(environment), *program]
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
