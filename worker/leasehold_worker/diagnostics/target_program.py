"""The test program of ``leasehold validate``: it holds GPU memory, checks it, and reports.

It counts rounds in device memory. In each it reads the whole buffer back, compares it with the written bytes,
and replaces a file with its sighting. Suspended, it stops in the middle of a round. SIGTERM ends the program,
and so does the end of the validator.
"""

import argparse
import contextlib
import os
import random
import select
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec
from cuda.bindings import driver

CHUNK_BYTES: Final = 2**24
"""Bytes of one copy. Their content depends on their place in the buffer."""

SHIFT_BYTES: Final = 65537
"""Shift of the pattern between chunks: no two chunks are equal."""

INTERVAL_S: Final = 0.02
LAST_ROUND_S: Final = 10.0
"""Time for the program to end after its validator. A suspended one can't."""


class Sighting(msgspec.Struct, frozen=True):
    """The program's observation in its newest round.

    Attributes:
        rounds: Number of finished rounds.
        intact: Whether every byte was as written, in all rounds.
        gpu_uuid: The GPU as the driver names it inside the process.
    """

    rounds: int
    intact: bool
    gpu_uuid: str


def call(function: Any, *arguments: Any) -> Any:
    """Makes a driver call; an error ends the program."""
    result, *values = function(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"{function.__name__} answered {result.name}")
    return values[0] if values else None


def chunks(total: int) -> Iterator[tuple[int, memoryview]]:
    """The start and the content of each chunk of a buffer."""
    block = random.Random(total).randbytes(min(total, CHUNK_BYTES))
    twice = memoryview(block + block)
    for number, begin in enumerate(range(0, total, CHUNK_BYTES)):
        shift = number * SHIFT_BYTES % len(block)
        yield begin, twice[shift : shift + min(CHUNK_BYTES, total - begin)]


def end_with(validator_pidfd: int, stop: SimpleQueue[None]) -> None:
    """Waits for the end of the validator, and then ends the program."""
    select.select([validator_pidfd], [], [])
    stop.put(None)
    time.sleep(LAST_ROUND_S)
    os._exit(1)


def main() -> None:
    """Runs until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--validator", type=int, required=True)
    options = parser.parse_args()
    # Not an Event: a handler that interrupts its wait() may find the lock taken that set() needs.
    stop: SimpleQueue[None] = SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: stop.put(None))
    watched = os.pidfd_open(options.validator)
    threading.Thread(target=end_with, args=(watched, stop), daemon=True).start()
    call(driver.cuInit, 0)
    device = call(driver.cuDeviceGet, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device))
    buffer, counter = int(call(driver.cuMemAlloc, options.bytes)), call(driver.cuMemAlloc, 8)
    for begin, content in chunks(options.bytes):
        call(driver.cuMemcpyHtoD, buffer + begin, content, len(content))
    call(driver.cuMemcpyHtoD, counter, bytes(8), 8)
    run(options.file, device, counter, buffer, options.bytes, stop)
    call(driver.cuDevicePrimaryCtxRelease, device)


def run(path: Path, device: Any, counter: Any, buffer: int, size_bytes: int, stop: SimpleQueue[None]) -> None:
    """Finishes rounds one after the other."""
    contents = list(chunks(size_bytes))
    rounds, intact = 0, True
    while True:
        for begin, content in contents:
            if not stop.empty():
                return
            found = bytearray(len(content))
            call(driver.cuMemcpyDtoH, found, buffer + begin, len(content))
            intact = intact and found == content
        counted = bytearray(8)
        call(driver.cuMemcpyDtoH, counted, counter, 8)
        intact = intact and int.from_bytes(counted, "little") == rounds
        rounds += 1
        call(driver.cuMemcpyHtoD, counter, rounds.to_bytes(8, "little"), 8)
        name = f"GPU-{uuid.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, device).bytes))}"
        tell(path, Sighting(rounds, intact, name))
        with contextlib.suppress(Empty):
            stop.get(timeout=INTERVAL_S)
            return


def tell(path: Path, sighting: Sighting) -> None:
    """Replaces the file atomically."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(sighting))
    os.replace(fresh, path)


if __name__ == "__main__":
    main()
