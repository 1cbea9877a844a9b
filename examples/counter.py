"""Counts in GPU memory, and proves with every count that the memory is intact.

Fills a device buffer with a pattern that follows from the count. Then, at every interval, copies it back,
checks every byte, prints the count, and writes the pattern of the next one. Damaged memory shows: a line says
`corrupt` and the program fails. A lost or repeated count shows too: the printed numbers are consecutive.

Needs cuda-bindings 13 or newer and a GPU, real or simulated. SIGTERM and SIGINT end it between two counts.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import select
import signal
import sys
import uuid
from typing import Any

from cuda.bindings import driver

_UNITS = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_PERIOD = 251  # a prime: shifted or swapped pages do not fit the pattern


def check(answer: tuple[Any, ...]) -> Any:
    """Returns what a driver call answers beside its error code, or ends the program on an error."""
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        sys.exit(f"counter: the driver answered {name.decode() if name else int(error)}")
    return values[0] if values else None


def parse_size(text: str) -> int:
    """Reads a size such as 64MiB."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write one like 64MiB, with B, KiB, MiB or GiB"
        )
    return int(match[1]) * _UNITS[match[2]]


class Pattern:
    """The bytes that stand for each count: one long cycle, read from a place that follows from the count."""

    def __init__(self, size: int) -> None:
        repeats = (size + _PERIOD) // _PERIOD + 1
        self._cycle = memoryview(bytes(range(_PERIOD)) * repeats)
        self._size = size

    def of(self, count: int) -> memoryview:
        """The pattern of a count, which differs from that of its neighbours in every byte."""
        start = count % _PERIOD
        return self._cycle[start : start + self._size]


def gpu_uuid(device: Any) -> str:
    """Asks the driver afresh: after a move the same device is another GPU."""
    return f"GPU-{uuid.UUID(bytes=bytes(check(driver.cuDeviceGetUuid(device)).bytes))}"


def first_difference(found: bytearray, expected: memoryview) -> int:
    """The position of the first byte that differs."""
    return next(index for index, value in enumerate(expected) if found[index] != value)


def stop_signals() -> int:
    """Catches SIGTERM and SIGINT. The returned descriptor is readable from the first such signal on.

    A handler alone is not enough: the signal may arrive just before the wait that it should end.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return readable


def parse_interval(text: str) -> float:
    """Parses seconds between 0 and a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds from 0 to 86400, such as 0.1")
    return seconds


def main() -> int:
    """Counts until it is told to stop. Returns 1 if a byte was wrong."""
    parser = argparse.ArgumentParser(description="Count in GPU memory, checking every byte at every count.")
    parser.add_argument(
        "--bytes", type=parse_size, default="64MiB", metavar="SIZE", help="size of the buffer"
    )
    parser.add_argument(
        "--interval-s", type=parse_interval, default=0.1, metavar="S", help="time between two counts"
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device to use")
    parser.add_argument("--counts", type=int, metavar="N", help="stop after so many counts")
    options = parser.parse_args()

    stop = stop_signals()
    try:
        check(driver.cuInit(0))
    except RuntimeError:  # cuda-bindings found no driver library
        sys.exit("counter: no CUDA driver here: try `leasehold simgpu exec --gpus 1 -- COMMAND`")
    device = check(driver.cuDeviceGet(options.device))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    buffer = check(driver.cuMemAlloc(options.bytes))
    pattern = Pattern(options.bytes)
    found = bytearray(options.bytes)

    count = 0
    check(driver.cuMemcpyHtoD(buffer, pattern.of(count), options.bytes))
    stopped = False
    while not stopped and count != options.counts:
        check(driver.cuMemcpyDtoH(found, buffer, options.bytes))
        expected = pattern.of(count)
        if found != expected:
            position = first_difference(found, expected)
            print(
                f"count={count} gpu={gpu_uuid(device)} corrupt byte {position}: "
                f"found {found[position]}, expected {expected[position]}",
                flush=True,
            )
            return 1
        print(f"count={count} gpu={gpu_uuid(device)} ok", flush=True)
        count += 1
        check(driver.cuMemcpyHtoD(buffer, pattern.of(count), options.bytes))
        stopped = bool(select.select([stop], [], [], options.interval_s)[0])

    check(driver.cuMemFree(buffer))
    check(driver.cuDevicePrimaryCtxRelease(device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
