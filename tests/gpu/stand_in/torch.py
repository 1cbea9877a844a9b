"""As much of PyTorch as torch_program.py uses, on the driver API: PyTorch's own kernels need a real GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver
from leasehold_simgpu import SimulatedHost

float32, float64 = np.float32, np.float64


def _ok(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA error: {error.name}")
    return values[0] if values else None


class cuda:
    """torch.cuda."""

    @staticmethod
    def is_available() -> bool:
        return bool(driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS)

    @staticmethod
    def empty_cache() -> None:
        """Nothing is cached."""


class _Profile:
    """torch.profiler.profile: the simulated host is told of the profiler."""

    def __init__(self, activities: list[str]) -> None:
        assert activities == [profiler.ProfilerActivity.CUDA]

    def start(self) -> None:
        SimulatedHost.open(os.environ["LEASEHOLD_SIMGPU_DIR"]).set_profiler(os.getpid())


profiler = SimpleNamespace(profile=_Profile, ProfilerActivity=SimpleNamespace(CUDA="CUDA"))


class Tensor:
    """A vector in host memory, or in that of a GPU."""

    def __init__(self, values: Any, device: str) -> None:
        self._size = values.nbytes
        self._dtype = values.dtype
        self._values: Any = values if device == "cpu" else None
        self._address = 0 if device == "cpu" else _upload(values)

    def _read(self) -> Any:
        if self._values is not None:
            return self._values
        found = np.empty(self._size // self._dtype.itemsize, self._dtype)
        _ok(driver.cuMemcpyDtoH(found.ctypes.data, self._address, self._size))
        return found

    def cpu(self) -> Tensor:
        return Tensor(self._read(), "cpu")

    def to(self, device: str) -> Tensor:
        return Tensor(self._read(), device)

    def sum(self, dtype: Any) -> Any:
        return self._read().sum(dtype=dtype)

    def __add__(self, other: float) -> Tensor:
        return Tensor(self._read() + np.float32(other), "cuda")

    def __sub__(self, other: float) -> Tensor:
        return Tensor(self._read() - np.float32(other), "cuda")

    def __mod__(self, other: float) -> Tensor:
        return Tensor(self._read() % np.float32(other), "cuda")

    def __del__(self) -> None:
        if self._address:
            driver.cuMemFree(self._address)


def _upload(values: Any) -> int:
    _ok(driver.cuInit(0))
    _ok(driver.cuCtxSetCurrent(_ok(driver.cuDevicePrimaryCtxRetain(_ok(driver.cuDeviceGet(0))))))
    address = int(_ok(driver.cuMemAlloc(values.nbytes)))
    _ok(driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes))
    return address


def arange(size: int, dtype: Any, device: str) -> Tensor:
    return Tensor(np.arange(size, dtype=dtype), device)
