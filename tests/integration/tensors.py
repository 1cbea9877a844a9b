"""Device memory with bytes that can be compared, for a model server: its weights and its KV cache."""

import functools
import zlib
from typing import Any, Final

from cuda.bindings import driver

_PERIOD: Final = 251  # a prime: shifted or swapped pages do not fit the pattern
TENSOR_BYTES: Final = 64 * 2**20
"""Weights are allocated in pieces of so much: they never need to be in memory twice."""


def check(answer: tuple[Any, ...]) -> Any:
    """Returns what a driver call answers beside its error code, or raises."""
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"the driver answered {name.decode() if name else int(error)}")
    return values[0] if values else None


@functools.lru_cache(maxsize=1)
def _cycle(size: int) -> memoryview:
    return memoryview(bytes(range(_PERIOD)) * (size // _PERIOD + 2))


def pattern(size: int, start: int) -> memoryview:
    """The weights from a place on: what loading them yields."""
    shift = start % _PERIOD
    return _cycle(size)[shift : shift + size]


def expected_checksum(size: int) -> int:
    """The checksum of weights of that size that are as they were loaded."""
    checksum = 0
    for start in range(0, size, TENSOR_BYTES):
        checksum = zlib.crc32(pattern(min(TENSOR_BYTES, size - start), start), checksum)
    return checksum


class Tensors:
    """Device memory of one purpose, in pieces; or what of it is in host memory."""

    def __init__(self, size: int) -> None:
        self._sizes = [min(TENSOR_BYTES, size - start) for start in range(0, size, TENSOR_BYTES)]
        self._buffers: list[Any] = []
        self._kept: list[bytearray] = []

    @property
    def is_resident(self) -> bool:
        """Whether it is on the device."""
        return bool(self._buffers)

    def allocate(self) -> None:
        """Takes device memory, with garbage in it or what was kept."""
        if self._buffers:
            return
        for number, size in enumerate(self._sizes):
            buffer = check(driver.cuMemAlloc(size))
            self._buffers.append(buffer)
            if self._kept:
                check(driver.cuMemcpyHtoD(buffer, self._kept[number], size))
                self._kept[number] = bytearray()
            else:
                check(driver.cuMemsetD8(buffer, 0xA5, size))
        self._kept = []

    def load(self) -> None:
        """Fills it as from a file of weights."""
        start = 0
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            check(driver.cuMemcpyHtoD(buffer, pattern(size, start), size))
            start += size

    def free(self, *, keep: bool) -> None:
        """Gives the device memory up, and keeps the bytes in host memory if that is wanted."""
        for buffer, size in zip(self._buffers, self._sizes, strict=False):
            if keep:
                self._kept.append(bytearray(size))
                check(driver.cuMemcpyDtoH(self._kept[-1], buffer, size))
            check(driver.cuMemFree(buffer))
        self._buffers = []

    def checksum(self) -> int | None:
        """That of what is on the device. None: nothing is."""
        if not self._buffers:
            return None
        checksum, piece = 0, bytearray(max(self._sizes))
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            view = memoryview(piece)[:size]
            check(driver.cuMemcpyDtoH(view, buffer, size))
            checksum = zlib.crc32(view, checksum)
        return checksum
