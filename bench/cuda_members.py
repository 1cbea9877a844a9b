"""A workload for benchmarks: CUDA processes that hold memory and access a word of it every few milliseconds.

The first process forks the others before any CUDA call. Each prints `ready` once its memory is filled, and
fails if the word has another value than it wrote. SIGTERM to the first process ends all, each between two
calls: killing a restored process was seen to hang a host (NVIDIA/cuda-checkpoint 53).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_INTERVAL_S: Final = 0.005


def call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """A driver call. An error ends the process."""
    result: int = getattr(library, name)(*arguments)
    if result != 0:
        raise SystemExit(f"{name}: the driver answered {result}")


def hold(member: int, size: int, stopping: threading.Event) -> None:
    """Fills memory on the visible GPU of this member, and accesses it until SIGTERM."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count, device = ctypes.c_int(), ctypes.c_int()
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    call(cuda, "cuInit", 0)
    call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    call(cuda, "cuDeviceGet", ctypes.byref(device), member % count.value)
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call(cuda, "cuCtxSetCurrent", context)
    call(cuda, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    call(cuda, "cuMemsetD8_v2", address, ctypes.c_uint8(member + 1), ctypes.c_size_t(size))
    call(cuda, "cuCtxSynchronize")
    os.write(1, b"ready\n")
    written, found = ctypes.c_uint64(), ctypes.c_uint64()
    word = ctypes.c_size_t(ctypes.sizeof(written))
    while not stopping.is_set():
        written.value += 1
        call(cuda, "cuMemcpyHtoD_v2", address, ctypes.byref(written), word)
        stopping.wait(_INTERVAL_S)
        call(cuda, "cuMemcpyDtoH_v2", ctypes.byref(found), address, word)
        if found.value != written.value:
            raise SystemExit(f"member {member} wrote {written.value} and reads {found.value}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1, metavar="N", help="number of processes")
    parser.add_argument("--bytes", type=int, default=2**20, metavar="B", help="memory of each process")
    options = parser.parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    parent = os.getpid()
    for member in range(1, options.members):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() == parent:
                hold(member, options.bytes, stopping)
            sys.exit()
    hold(0, options.bytes, stopping)


if __name__ == "__main__":
    main()
