"""A workload of several CUDA processes that costs little, for tests that suspend and move many of them.

The first process forks the others before any CUDA call, so each is a CUDA process of its own. Every member
keeps a buffer on its GPU, and in every round reads it back, checks each byte and writes the round's number
into it. What it has seen it tells in a file that all of them share: `Members` reads it.

Plain ctypes on libcuda: it starts in some tens of milliseconds. SIGTERM ends the first process, and the
kernel ends the others with it. This module needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PROGRAM: Final = Path(__file__).resolve()
PROGRESS_ROUNDS: Final = 2

_HEADER: Final = struct.Struct("<QQ")  # pid, round
_PERIOD: Final = 251  # a prime: shifted or swapped pages do not fit the pattern
_PR_SET_PDEATHSIG: Final = 1


class Record(ctypes.Structure):
    """What one member tells. Each field is one aligned word, so no reader sees half of it."""

    pid: int
    error: int
    rounds: int
    corrupt: int

    _fields_ = (
        ("pid", ctypes.c_uint32),
        ("error", ctypes.c_uint32),
        ("rounds", ctypes.c_uint64),
        ("corrupt", ctypes.c_uint64),
    )


class Members:
    """Reads the shared file of one start of the program; it may be made before that start."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._records: Sequence[Record] = ()

    def __len__(self) -> int:
        return len(self._open())

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each member; the first is the one that forked the others. 0: not forked yet."""
        return tuple(record.pid for record in self._open())

    def all_rounds(self) -> tuple[int, ...]:
        """How many rounds each member has finished."""
        return tuple(record.rounds for record in self._open())

    def corrupt(self, member: int) -> bool:
        """Has a member ever read a byte that it did not write?"""
        return bool(self._open()[member].corrupt)

    def error(self, member: int) -> int:
        """The last CUresult of a member that was not success; 0 if there was none."""
        return self._open()[member].error

    def is_ready(self) -> bool:
        """Has every member finished a round?"""
        return bool(self._open()) and min(self.all_rounds()) > 0

    def has_progressed(self, since: Sequence[int]) -> bool:
        """Has every member counted on by two rounds since these were its `all_rounds()`?

        One round may have been under way already; the second one began afterwards.
        """
        return all(now >= then + PROGRESS_ROUNDS for now, then in zip(self.all_rounds(), since, strict=True))

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Waits until every member has finished a round. Blocks: in trio, call it in a thread.

        Raises:
            AssertionError: They did not in time, or a byte was wrong.
        """
        end = time.monotonic() + timeout
        while not self.is_ready():
            assert time.monotonic() < end, f"not ready after {timeout:g} s: {self.describe()}"
            time.sleep(0.005)
        self.check_intact()

    def all_progress(self, timeout: float = 30.0) -> None:
        """Waits until every member has counted on. Blocks: in trio, call it in a thread.

        Raises:
            AssertionError: One stood still for so long, or a byte was wrong.
        """
        since = self.all_rounds()
        end = time.monotonic() + timeout
        while not self.has_progressed(since):
            assert time.monotonic() < end, f"stood still for {timeout:g} s: {self.describe()}, from {since}"
            time.sleep(0.005)
        self.check_intact()

    def check_intact(self) -> None:
        """Fails if any member has ever read a byte that it did not write."""
        assert not any(record.corrupt for record in self._open()), f"corrupt: {self.describe()}"

    def describe(self) -> str:
        """Every member on one line."""
        return "; ".join(
            f"{member}: pid {record.pid}, {record.rounds} rounds, error {record.error}"
            + ", corrupt" * bool(record.corrupt)
            for member, record in enumerate(self._open())
        )

    def _open(self) -> Sequence[Record]:
        if not self._records and self.path.exists():
            self._records = _map(self.path)
        return self._records


def _map(path: Path) -> Sequence[Record]:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return tuple((Record * (len(memory) // ctypes.sizeof(Record))).from_buffer(memory))


def _create(path: Path, members: int) -> Sequence[Record]:
    """Makes the file anew; it appears with its full size."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(bytes(ctypes.sizeof(Record) * members))
    temporary.rename(path)
    return _map(path)


class _CudaError(Exception):
    def __init__(self, result: int) -> None:
        super().__init__(f"the driver answered {result}")
        self.result = result


class _Cuda:
    """The calls of libcuda that a member makes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        result: int = getattr(self._library, name)(*arguments)
        if result != 0:
            raise _CudaError(result)

    def device_count(self) -> int:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value


class _Buffer:
    """A buffer on one GPU, and what must be in it."""

    def __init__(self, cuda: _Cuda, device: int, size: int) -> None:
        self._cuda = cuda
        self._size = ctypes.c_size_t(size)
        self._context = ctypes.c_void_p()
        self._address = ctypes.c_uint64()
        start = (os.getpid() + device) % _PERIOD  # another member's bytes differ
        cycle = bytes((start + index) % _PERIOD for index in range(_PERIOD))
        self._written = bytearray((cycle * (size // _PERIOD + 1))[:size])
        self._read = bytearray(size)
        handle = ctypes.c_int()
        cuda.call("cuDeviceGet", ctypes.byref(handle), device)
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        cuda.call("cuCtxSetCurrent", self._context)
        cuda.call("cuMemAlloc_v2", ctypes.byref(self._address), self._size)
        cuda.call("cuMemcpyHtoD_v2", self._address, _pointer(self._written), self._size)

    def is_intact(self) -> bool:
        self._cuda.call("cuCtxSetCurrent", self._context)
        self._cuda.call("cuMemcpyDtoH_v2", _pointer(self._read), self._address, self._size)
        return self._read == self._written

    def write(self, number: int) -> None:
        header = bytearray(_HEADER.pack(os.getpid(), number))
        self._cuda.call("cuCtxSetCurrent", self._context)
        self._cuda.call("cuMemcpyHtoD_v2", self._address, _pointer(header), ctypes.c_size_t(len(header)))
        self._written[: len(header)] = header


def _pointer(data: bytearray) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(data)).from_buffer(data)


def _run(member: int, record: Record, options: argparse.Namespace) -> None:
    """Counts until the process is ended. A round in which CUDA fails is told, and tried again."""
    record.pid = os.getpid()
    try:
        cuda = _Cuda()
        visible = cuda.device_count()
        first = member * options.gpus_per_member
        devices = {(first + number) % visible for number in range(options.gpus_per_member)}
        buffers = [_Buffer(cuda, device, options.bytes) for device in sorted(devices)]
    except _CudaError as error:
        record.error = error.result
        raise
    while True:
        try:
            if not all(buffer.is_intact() for buffer in buffers):
                record.corrupt = 1
            for buffer in buffers:
                buffer.write(record.rounds + 1)
            record.rounds += 1
        except _CudaError as error:
            record.error = error.result
        time.sleep(options.interval_s)


def _fork_member() -> bool:
    """True in the child, which ends with its parent."""
    parent = os.getpid()
    if os.fork() != 0:
        return False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    return True


def _members(records: Sequence[Record], options: argparse.Namespace) -> None:
    for member in range(1, options.members):
        if _fork_member():
            return _run(member, records[member], options)
    return _run(0, records[0], options)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="CUDA processes that count in GPU memory, and check it.")
    parser.add_argument("--members", type=int, default=1, metavar="N", help="how many processes")
    parser.add_argument("--file", type=Path, required=True, metavar="PATH", help="where they tell of it")
    parser.add_argument("--bytes", type=int, default=64 * 1024, metavar="B", help="buffer on each GPU")
    parser.add_argument("--gpus-per-member", type=int, default=1, metavar="G", help="of the visible ones")
    parser.add_argument("--interval-s", type=float, default=0.005, metavar="S", help="between two rounds")
    options = parser.parse_args()
    if options.bytes < _HEADER.size or options.members < 1 or options.gpus_per_member < 1:
        parser.error(f"choose at least 1 member, 1 GPU for each, and {_HEADER.size} bytes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _members(_create(options.file, options.members), options)


if __name__ == "__main__":
    main()
