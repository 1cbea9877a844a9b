"""Programs and hooks get none of the capabilities of a worker that runs without root."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_worker.hooks import command_hook
from leasehold_worker.programs import shim

NOBODY = 65534
AMBIENT = "+sys_ptrace,+kill,+dac_read_search"
"""The last one lets the process read this checkout, wherever it is."""

PROGRAM = ["/bin/grep", "^Cap", "/proc/self/status"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give capabilities away"
)


def run_with_capabilities(*command: str, descriptors: tuple[int, ...] = ()) -> dict[str, int]:
    """The capability sets that a command prints, which runs as another user with ambient capabilities."""
    user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    granted = ["setpriv", *user, "--inh-caps", AMBIENT, "--ambient-caps", AMBIENT, "--"]
    done = subprocess.run(
        [*granted, *command], capture_output=True, text=True, timeout=60, check=False, pass_fds=descriptors
    )
    assert done.stdout, done.stderr
    lines = (line.split(":") for line in done.stdout.splitlines())
    return {name: int(value, 16) for name, value in lines}


def require_none(sets: dict[str, int]) -> None:
    """Checks that a process has no capability, now or after another exec."""
    assert {sets[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}


def test_the_worker_of_this_test_has_capabilities() -> None:
    assert run_with_capabilities(*PROGRAM)["CapEff"] != 0


def test_a_program_has_no_capability(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    environment = os.memfd_create("environment")
    os.write(environment, f"PATH={os.environ['PATH']}".encode())
    os.lseek(environment, 0, os.SEEK_SET)
    status_read, status = os.pipe()
    settings = [str(tmp_path), "boot", str(status), "1024", "", str(environment), "/"]
    command = [sys.executable, "-I", "-S", shim.__file__, *settings, *PROGRAM]
    try:
        require_none(run_with_capabilities(*command, descriptors=(status, environment)))
    finally:
        for descriptor in (environment, status_read, status):
            os.close(descriptor)


def test_a_hook_has_no_capability() -> None:
    errors_read, errors = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", command_hook._BECOME, str(errors), "/", *PROGRAM]
    try:
        require_none(run_with_capabilities(*command, descriptors=(errors,)))
    finally:
        os.close(errors_read)
        os.close(errors)
