"""The program that scenarios checkpoint. It imports little: its start is most of a scenario's time."""

from __future__ import annotations

import ctypes
import sys
import time
import uuid
from typing import Any

from cuda.bindings import driver

SIZE = 16 * 2**20
WORK_S = 3.0
"""How long submitted work takes where a lock is to wait for it."""


def ok(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise AssertionError(f"the driver answered {error.name} ({int(error)})")
    return values[0] if values else None


def uuid_of(device: int) -> str:
    return f"GPU-{uuid.UUID(bytes=bytes(ok(driver.cuDeviceGetUuid(device)).bytes))}"


def work(_: object) -> None:
    """Work on a stream, which says when it begins."""
    print("working", flush=True)
    time.sleep(WORK_S)


def main() -> None:
    """Answers `uuid`, `check` and `work` until its input ends."""
    ok(driver.cuInit(0))
    device = ok(driver.cuDeviceGet(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
    buffer = ok(driver.cuMemAlloc(SIZE))
    pattern = bytes(range(256)) * (SIZE // 256)
    on_stream = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
    ok(driver.cuMemcpyHtoD(buffer, pattern, SIZE))
    print("ready")
    for line in sys.stdin:
        match line.strip():
            case "uuid":
                print(uuid_of(device))
            case "check":
                found = bytearray(SIZE)
                ok(driver.cuMemcpyDtoH(found, buffer, SIZE))
                print("intact" if found == pattern else "corrupt")
            case "work":
                ok(
                    driver.cuLaunchHostFunc(
                        0, driver.CUhostFn(ctypes.cast(on_stream, ctypes.c_void_p).value), 0
                    )
                )
                ok(driver.cuCtxSynchronize())
                print("done")
            case question:
                print(f"what is {question}?")


if __name__ == "__main__":
    main()
