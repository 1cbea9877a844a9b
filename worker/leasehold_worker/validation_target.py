"""The program that ``leasehold validate`` suspends and moves: it keeps memory on a GPU, checks it, and tells.

It counts rounds in device memory. In each it reads the whole buffer back, compares it with what it wrote, and
replaces the file that it was given with what it has seen. Parked, it stands still in the middle of a round.
"""

import argparse
import os
import random
import time
import uuid
from pathlib import Path
from typing import Any, Final

import msgspec
from cuda.bindings import driver

CHUNK_BYTES: Final = 2**24
INTERVAL_S: Final = 0.02


class Sighting(msgspec.Struct, frozen=True):
    """What the program saw in its newest round.

    Attributes:
        rounds: How many rounds it has finished.
        intact: Whether every byte was what was written, in all of them.
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


def pattern(number: int, size: int) -> bytes:
    """What a chunk holds."""
    return random.Random(number).randbytes(size)


def main() -> None:
    """Runs until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    options = parser.parse_args()
    call(driver.cuInit, 0)
    device = call(driver.cuDeviceGet, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device))
    counter = call(driver.cuMemAlloc, 8)
    chunks = [
        (call(driver.cuMemAlloc, size), pattern(number, size))
        for number, size in enumerate(sizes(options.bytes))
    ]
    for address, content in chunks:
        call(driver.cuMemcpyHtoD, address, content, len(content))
    rounds, intact = 0, True
    call(driver.cuMemcpyHtoD, counter, rounds.to_bytes(8, "little"), 8)
    while True:
        for address, content in chunks:
            found = bytearray(len(content))
            call(driver.cuMemcpyDtoH, found, address, len(content))
            intact = intact and found == content
        counted = bytearray(8)
        call(driver.cuMemcpyDtoH, counted, counter, 8)
        intact = intact and int.from_bytes(counted, "little") == rounds
        rounds += 1
        call(driver.cuMemcpyHtoD, counter, rounds.to_bytes(8, "little"), 8)
        name = f"GPU-{uuid.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, device).bytes))}"
        tell(options.file, Sighting(rounds, intact, name))
        time.sleep(INTERVAL_S)


def sizes(total: int) -> list[int]:
    """The sizes of the chunks that hold so many bytes."""
    full, rest = divmod(total, CHUNK_BYTES)
    return [CHUNK_BYTES] * full + ([rest] if rest else [])


def tell(path: Path, sighting: Sighting) -> None:
    """Replaces the file, so that no reader sees half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(sighting))
    os.replace(fresh, path)


if __name__ == "__main__":
    main()
