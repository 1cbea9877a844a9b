"""Counters on this host's GPUs, suspended, restored and moved by a real coordinator and worker.

It drives the command line, and proves from the counters' own output that no count was lost and no byte is
wrong. With two GPUs of one chip a counter is moved, and two swap their GPUs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.gpu.fleet import WORKER, Fleet, FleetError, fleet, sound
from tests.gpu.stand import MOVES_CUDA_VERSION, cuda_version

COUNTER: Final = Path(__file__).resolve().parents[2] / "examples/counter.py"
PROGRAM: Final = (sys.executable, str(COUNTER), "--bytes", "64MiB", "--interval-s", "0.05")


def suspend_and_restore(there: Fleet, name: str) -> None:
    """Suspends a counter, sees that it stands still, and restores it."""
    there.command("suspend", name)
    if (state := there.state(name)) != "SUSPENDED":
        raise FleetError(f"{name} is {state} after its suspend")
    there.stands_still(name)
    there.command("restore", name)
    there.counts_on(name)


def move(there: Fleet, name: str, do: Callable[[], str], gpu_uuid: str) -> None:
    """Moves a counter, and sees that it counts on its new GPU."""
    do()
    seen = there.counts_on(name).gpu_uuids[-1]
    if seen != gpu_uuid:
        raise FleetError(f"{name} counts on {seen} after its move to {gpu_uuid}")


def destination(there: Fleet, gpu_uuid: str) -> dict[str, Any] | None:
    """A GPU of the same chip, if the driver can move processes."""
    gpus = {each["gpu"]["uuid"]: each["gpu"] for each in there.gpus()}
    name = gpus.pop(gpu_uuid)["name"]
    same = [gpu for gpu in gpus.values() if gpu["name"] == name]
    return same[0] if same and cuda_version() >= MOVES_CUDA_VERSION else None


def swap(there: Fleet, here_uuid: str, other: dict[str, Any]) -> None:
    """Moves `one` to the other GPU and back, and swaps it with `two`."""
    slot = f"{WORKER}/{other.get('slot', 0)}"
    move(there, "one", lambda: there.command("remap", "one", "--to", slot), other["uuid"])
    there.run("two", PROGRAM, "--gpu", here_uuid)
    move(there, "one", lambda: there.command("remap", "one", "two", "--swap"), here_uuid)
    if (seen := there.counts_on("two").gpu_uuids[-1]) != other["uuid"]:
        raise FleetError(f"two counts on {seen} after the swap")


def main() -> int:
    """Runs the command line."""
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as there:
        there.run("one", PROGRAM)
        here_uuid = there.counts_on("one").gpu_uuids[-1]
        for _ in range(2):
            suspend_and_restore(there, "one")
        other = destination(there, here_uuid)
        if other is not None:
            swap(there, here_uuid, other)
        found: dict[str, Any] = {"moved": other is not None}
        for name in ("one", "two") if other else ("one",):
            there.command("stop", name)
            report = sound(name, there.counted(name))
            found[name] = {"counts": report.counts, "lost": 0, "corrupt": 0, "gpus": report.gpu_uuids}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FleetError as error:
        sys.exit(f"counters: {error}")
