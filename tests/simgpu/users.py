"""Programs of several Unix users on one simulated host. The users need no account on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost

from tests import environment

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can start programs as other users"
)


def as_user(uid: int, *capabilities: str) -> list[str]:
    """The wrapper that starts a command as a user with exactly these capabilities."""
    granted = ",".join(f"+{name}" for name in capabilities)
    sets = [f"--inh-caps={granted}", f"--ambient-caps={granted}"] if granted else []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *sets, "--"]


def skip_if_unreadable(program: Path) -> None:
    """Skips the test if other users can't read a program of this checkout, or its interpreter."""
    # As the tests start their programs: setpriv still has root's capabilities at its exec of the interpreter.
    code = f"open({str(program)!r}).read(); import cuda.bindings"
    trial = [*as_user(65534), sys.executable, "-c", code]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip("other users can't read this checkout and its interpreter")


def share(host: SimulatedHost, folder: Path) -> dict[str, str]:
    """The environment of a host whose files every user can use.

    Args:
        host: Its directory must be below the folder of the run of tests.
        folder: An empty folder for a copy of the libraries.
    """
    variables = host.environment()
    libraries = folder / "lib"
    shutil.copytree(variables["LD_LIBRARY_PATH"].split(":")[0], libraries)
    for root in (host.directory, libraries):
        for path in (root, *root.rglob("*")):
            path.chmod(0o777 if path.is_dir() or root == libraries else 0o666)
        _open_to_others(root)
    return {**variables, "LD_LIBRARY_PATH": str(libraries)}


def _open_to_others(folder: Path) -> None:
    run_folder = Path(os.environ[environment.MARK])
    for part in folder.parents:
        if part.is_relative_to(run_folder):
            part.chmod(part.stat().st_mode | 0o011)
