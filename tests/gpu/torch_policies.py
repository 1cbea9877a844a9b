"""Eviction policies with a PyTorch process, where a Python of the host has PyTorch and a GPU for it.

Each policy suspends and wakes the process of `torch_program.py` through a real coordinator and worker, and
sees that it computes on without a lost or wrong round. Command hooks have it offload its weights.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from tests.gpu.fleet import FleetError, fleet, sound
from tests.gpu.steps import SKIPPED

TORCH_PROGRAM: Final = Path(__file__).with_name("torch_program.py")
POLICIES: Final = ("retain+cuda_suspend", "offload+cuda_suspend", "offload+keep_running")
PARKED: Final = ("SUSPENDED", "SLEEPING")
MIB: Final = 512
IMPORT_S: Final = 60.0
PYTHONS: Final = ("python3", "python", "/opt/conda/bin/python3", "/usr/bin/python3")


def python_with_torch() -> str | None:
    """A Python of the host in which PyTorch sees a GPU.

    Of the names in PATH, and of two places where images have it. The Python that runs here has none.
    """
    ask = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
    for name in PYTHONS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "-c", ask], capture_output=True, timeout=IMPORT_S, check=False)
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            return path
    return None


def hooks(python: str, folder: Path) -> list[dict[str, Any]]:
    """What tells the program to offload its weights, and to load them again."""
    return [
        {
            "name": word,
            "phase": phase,
            "weight_strategies": ["WEIGHT_STRATEGY_OFFLOAD"],
            "frees_memory": word == "offload",
            "command": {"arguments": [python, str(TORCH_PROGRAM), "tell", str(folder), word]},
        }
        for word, phase in (("offload", "HOOK_PHASE_BEFORE_SUSPEND"), ("load", "HOOK_PHASE_AFTER_RESTORE"))
    ]


def measure(python: str, folder: Path) -> dict[str, Any]:
    """Suspends and wakes by each policy, and returns the seconds of both."""
    found: dict[str, Any] = {"python": python, "mib": MIB}
    told = folder / "told"
    told.mkdir()
    hooks_file = folder / "hooks.json"
    hooks_file.write_text(json.dumps(hooks(python, told)))
    with fleet(folder) as there:
        program = (python, str(TORCH_PROGRAM), "serve", str(told), str(MIB))
        there.run("torch", program, "--hooks", str(hooks_file))
        for policy in POLICIES:
            weights, process = policy.split("+")
            began = time.monotonic()
            there.command("suspend", "torch", "--weights", weights, "--process", process)
            suspended = time.monotonic()
            if (state := there.state("torch")) not in PARKED:
                raise FleetError(f"the process is {state} after {policy}")
            there.stands_still("torch")
            woken = time.monotonic()
            there.command("wake", "torch")
            took_s = {"suspend_s": suspended - began, "wake_s": time.monotonic() - woken}
            there.counts_on("torch")
            found[policy] = {name: round(seconds, 2) for name, seconds in took_s.items()}
        there.command("stop", "torch")
        found["rounds"] = sound("torch", there.counted("torch")).counts
    return found


def main() -> int:
    """Runs the command line."""
    python = python_with_torch()
    if python is None:
        print(f"no PyTorch that sees a GPU in any of {', '.join(PYTHONS)}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(python, Path(folder))))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FleetError as error:
        sys.exit(f"torch_policies: {error}")
