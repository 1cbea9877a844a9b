"""A model server as a GPU workload: vLLM's routes, before device memory that is really there and freed.

Its weights and its KV cache are device memory of the driver, simulated or real. Sleep level 1 copies the
weights to host memory and frees both; level 2 frees both and keeps nothing; waking allocates them again, and
after level 2 the weights are garbage until they are loaded again. So what a hook claims can be measured by
NVML, and what came back can be compared byte by byte.

``GET /state`` says who it is and what it has: pid, requests that were counted, checksum of the weights as
they are on the device now. ``POST /generate`` counts a request. Run it as
``python -m tests.integration.model_server --port-file FILE --weights 4MiB --kv 2MiB``.

What goes wrong is said by a JSON file (``--faults``): ``{"/sleep": ["500", 1]}`` answers the next sleep with
500. Beside routes, ``kernel.can_checkpoint`` and so on go wrong in the application that it is with
``--kernel``, and ``start`` ends the program at its start.
"""

import argparse
import functools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from cuda.bindings import driver

from tests.worker.framework_servers import Answer, Pending, VllmServer

_UNITS: Final = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_PERIOD: Final = 251  # a prime: shifted or swapped pages do not fit the pattern
TENSOR_BYTES: Final = 64 * 2**20
"""Weights are allocated in pieces of so much: they never need to be in memory twice."""

HANG_S: Final = 60.0
"""How long a call hangs at most, if nobody takes its file of faults away."""

FAULTS: Final = ("500", "hang", "not_freed", "break")
"""What a route can do wrong: an error, no answer, an answer without the deed, a broken connection."""


def check(answer: tuple[Any, ...]) -> Any:
    """Returns what a driver call answers beside its error code, or raises."""
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"the driver answered {name.decode() if name else int(error)}")
    return values[0] if values else None


def parse_size(text: str) -> int:
    """Reads a size such as 64MiB."""
    digits = text.rstrip("BKMGi")
    return int(digits) * _UNITS[text[len(digits) :]]


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


class Faults:
    """What is to go wrong, from a file that tests write."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def take(self, name: str) -> str:
        """The fault of this call, which is used up by that. Empty: there is none."""
        if self._path is None or not self._path.exists():
            return ""
        wanted = json.loads(self._path.read_text())
        if name not in wanted:
            return ""
        fault, times = wanted[name]
        wanted[name] = [fault, times - 1]
        if times <= 1:
            del wanted[name]
        write_whole(self._path, json.dumps(wanted))
        return str(fault)

    def wait_gone(self) -> None:
        """Waits until the file is taken away: what hangs is let go of then."""
        deadline = time.monotonic() + HANG_S
        while self._path is not None and self._path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(name).rename(path)


class ModelServer(VllmServer):
    """A vLLM server whose memory is the driver's.

    Attributes:
        requests: How many were counted.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.requests = 0
        self.faults = Faults(options.faults)
        check(driver.cuInit(0))
        self._device = check(driver.cuDeviceGet(0))
        self._context = check(driver.cuDevicePrimaryCtxRetain(self._device))
        check(driver.cuCtxSetCurrent(self._context))
        self._weights, self._cache = Tensors(options.weights), Tensors(options.kv)
        self._weights.allocate()
        self._weights.load()
        self._cache.allocate()
        super().__init__(options.port)

    def answer(self, method: str, target: str, body: bytes) -> Answer:
        path = urlsplit(target).path
        check(driver.cuCtxSetCurrent(self._context))  # of this thread, which serves one connection
        name = f"{path} {json.loads(body)['method']}" if path == "/collective_rpc" else path
        match self.faults.take(name):
            case "500":
                return 500, {"detail": "as scripted"}
            case "hang":
                self.faults.wait_gone()
                return None
            case "break":
                return None
            case "not_freed":
                self.frees = False
        try:
            return super().answer(method, target, body)
        finally:
            self.frees = True
            self.calls.clear()

    def serve(self, method: str, target: str, body: bytes) -> Answer | Pending:
        parts = urlsplit(target)
        match method, parts.path:
            case "GET", "/state":
                return 200, self.state()
            case "POST", "/generate" if not parts.query:
                if not self.serves:
                    return 503, {"detail": "it sleeps"}
                self.requests += 1
                return 200, {"requests": self.requests}
        answer = super().serve(method, target, body)
        if b"reload_weights" in body and self._weights.is_resident:
            self._weights.load()
        return answer

    def free_memory(self, level: int) -> None:
        if self.frees:
            self._cache.free(keep=False)
            self._weights.free(keep=level == 1)

    def take_memory(self, tags: Collection[str]) -> None:
        if "weights" in tags:
            self._weights.allocate()
        if "kv_cache" in tags:
            self._cache.allocate()

    def state(self) -> dict[str, object]:
        """Who it is, and what it has."""
        return {
            "pid": os.getpid(),
            "requests": self.requests,
            "checksum": self._weights.checksum(),
            "cache": self._cache.is_resident,
            "sleeping": sorted(self.sleeping),
            "says_it_sleeps": self.says_it_sleeps,
            "in_flight": self.in_flight,
        }


class ModelKernel:
    """The server as an application that saves itself: its checkpoint is its count of requests."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._wanted = threading.Event()

    def _fail(self, name: str) -> str:
        fault = self._server.faults.take(f"kernel.{name}")
        if fault == "raise":
            raise ValueError(f"{name} was told to")
        return fault

    def can_checkpoint(self) -> tuple[bool, str]:
        return (False, "in the middle of something") if self._fail("can_checkpoint") else (True, "")

    def checkpoint_size_estimate(self) -> int:
        return 10**18 if self._fail("checkpoint_size_estimate") else 64

    def prepare(self) -> None:
        self._fail("prepare")
        self._wanted.set()

    def is_quiescent(self) -> bool:
        return not self._fail("is_quiescent") and self._wanted.is_set()

    def checkpoint(self) -> int:
        self._fail("checkpoint")
        return self._server.requests

    def cancel(self) -> None:
        self._wanted.clear()

    def restore(self, checkpoint: int) -> None:
        self._fail("restore")
        self._server.requests = checkpoint

    def health(self) -> Any:
        from leasehold_client import kernel

        return kernel.Health.HEALTHY


def parser() -> argparse.ArgumentParser:
    """The options."""
    parsed = argparse.ArgumentParser(description="A model server for tests of how workloads are parked.")
    parsed.add_argument("--port-file", type=Path, required=True, help="where its port is written")
    parsed.add_argument("--port", type=int, default=0, help="0: one that is free")
    parsed.add_argument("--weights", type=parse_size, default=4 * 2**20, metavar="SIZE")
    parsed.add_argument("--kv", type=parse_size, default=2 * 2**20, metavar="SIZE")
    parsed.add_argument("--faults", type=Path, help="what goes wrong, as JSON")
    parsed.add_argument("--kernel", action="store_true", help="be an application that saves itself")
    return parsed


def main() -> int:
    """Serves until it is told to end."""
    options = parser().parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopping.set())
    if Faults(options.faults).take("start"):
        return 3
    server = ModelServer(options)
    port = server.url.rpartition(":")[2]
    if not options.kernel:
        write_whole(options.port_file, port)
        stopping.wait()
        return 0
    from leasehold_client import kernel  # not needed by the others, and large

    facts = kernel.KernelFacts(kernel_id="model", kind="server", version=1, codec=kernel.Msgpack(int))
    with kernel.serve(ModelKernel(server), facts):
        write_whole(options.port_file, port)
        stopping.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
