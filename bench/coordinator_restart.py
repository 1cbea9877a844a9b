"""Times the start of a coordinator with a full store: 10,000 workloads and 100,000 commands.

One command in a hundred is unfinished. A real coordinator process is started on the store several times, and
its log gives the time to load the store. Prints one JSON document.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from leasehold.v1 import command_pb2, operation_pb2, workload_pb2
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.storage.rows import command_row, workload_row
from leasehold_coordinator.storage.store import Store

from bench.machine import machine

WORKERS = 1_000
OPEN_SHARE = 100


def make_workload(number: int) -> workload_pb2.Workload:
    """A running workload."""
    workload = workload_pb2.Workload(
        workload_id=f"w-{number}",
        name=f"workload-{number}",
        worker_id=f"worker-{number % WORKERS}",
        spec=workload_pb2.WorkloadSpec(arguments=["python", "train.py", "--size", "large"]),
        status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=3),
    )
    workload.create_time.GetCurrentTime()
    return workload


def make_command(number: int, workloads: int) -> StoredCommand:
    """A command that its worker has accepted. One in `OPEN_SHARE` is unfinished."""
    ended = number % OPEN_SHARE != 0
    command = command_pb2.Command(
        command_id=f"c-{number}",
        worker_id=f"worker-{number % WORKERS}",
        workload_id=f"w-{number % workloads}",
        operation=operation_pb2.Operation(suspend=operation_pb2.SuspendOperation()),
        state=command_pb2.COMMAND_STATE_SUCCEEDED if ended else command_pb2.COMMAND_STATE_RUNNING,
    )
    command.create_time.GetCurrentTime()
    return StoredCommand(command, instance_id="i", accepted=True)


async def fill(database: Path, workloads: int, commands: int) -> None:
    """Writes the rows into a new store."""
    store = Store.open(str(database))
    rows = [workload_row(make_workload(number)) for number in range(workloads)]
    rows += [command_row(make_command(number, workloads)) for number in range(commands)]
    await store.write(*rows)
    store.close()


def start(database: Path) -> tuple[float, float]:
    """Starts a coordinator. Returns the seconds until it serves, and the seconds to load the store."""
    began = time.monotonic()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "leasehold_client", "coordinator"),
            *("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
            *("--database", str(database)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        serving_s = time.monotonic() - began
        process.terminate()
        loaded = re.search(r"open commands in ([\d.]+) s", process.stderr.read())
    if loaded is None:
        raise SystemExit("the coordinator's log has no time to load the store")
    return serving_s, float(loaded[1])


def main() -> None:
    """Measures, and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--commands", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder:
        empty, full = Path(folder) / "empty.sqlite3", Path(folder) / "full.sqlite3"
        asyncio.run(fill(full, options.workloads, options.commands))
        times = [(start(empty), start(full)) for _ in range(options.rounds)]
    document = {
        "machine": machine(),
        "workloads": options.workloads,
        "commands": options.commands,
        "open_commands": options.commands // OPEN_SHARE,
        "empty_serving_s": round(statistics.median(one[0] for one, _ in times), 2),
        "full_serving_s": round(statistics.median(one[0] for _, one in times), 2),
        "load_s": round(statistics.median(one[1] for _, one in times), 2),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
