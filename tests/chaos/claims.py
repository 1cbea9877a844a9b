"""Claims that compete with the commands of clients for the GPUs of one worker.

The claims come from a process of their own, since no process that a worker descends from may claim its GPUs.
"""

import contextlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, final

from google.protobuf.duration_pb2 import Duration
from leasehold.local.v1 import local_service_pb2
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec
from leasehold_client.errors import LeaseholdError
from leasehold_client.local import LocalWorker

WAIT_S: Final = 2
HOLD_S: Final = (0.05, 0.3)
PAUSE_S: Final = 0.2
END_TIMEOUT_S: Final = 60.0


@final
class Claimer:
    """A process that claims a GPU of a worker, waits for it and lets it go again, until it is told to end.

    Args:
        socket: The worker's.
        seed: Of how long a GPU is held.
    """

    def __init__(self, socket: Path, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.claims", str(socket), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self) -> int:
        """Ends it after its present claim, and returns how many were granted."""
        granted, _ = self._process.communicate(timeout=END_TIMEOUT_S)
        return int(granted or 0)


def claim(worker: LocalWorker, hold_s: float) -> bool:
    """Claims a GPU, holds it for a while and lets it go. False: it was not granted in time."""
    wanted = local_service_pb2.ClaimOpen(
        spec=WorkloadSpec(resources=Resources(gpu_count=1)),
        wait=Duration(seconds=WAIT_S),
        hold=local_service_pb2.CLAIM_HOLD_STREAM,
    )
    for response in worker.claim(local_service_pb2.ClaimRequest(open=wanted)):
        if response.WhichOneof("frame") == "granted":
            time.sleep(hold_s)
            worker.release(response.granted.workload_id)
            return True
    return False


def main() -> None:
    """Claims until standard input ends, and prints how many claims were granted."""
    socket, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    over = threading.Event()

    def wait_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_end, daemon=True).start()
    granted = 0
    while not over.wait(PAUSE_S):
        # Refused, not granted in time, or the worker has just died: another claim follows.
        with contextlib.suppress(LeaseholdError), LocalWorker(socket) as worker:
            granted += claim(worker, chance.uniform(*HOLD_S))
    sys.stdout.write(f"{granted}\n")


if __name__ == "__main__":
    main()
