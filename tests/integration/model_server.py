"""A model server as a GPU workload: the routes of vLLM or SGLang, before device memory that is really freed.

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
import json
import os
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from cuda.bindings import driver

from tests.integration.tensors import Tensors, check
from tests.worker.framework_servers import Answer, Pending, ScriptedServer, VllmServer
from tests.worker.sglang_server import SglangServer

_UNITS: Final = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
HANG_S: Final = 60.0
"""How long a call hangs at most, if nobody takes its file of faults away."""

FAULTS: Final = ("500", "hang", "not_freed", "break")
"""What a route can do wrong: an error, no answer, an answer without the deed, a broken connection."""


def parse_size(text: str) -> int:
    """Reads a size such as 64MiB."""
    digits = text.rstrip("BKMGi")
    return int(digits) * _UNITS[text[len(digits) :]]


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


class DeviceModel(ScriptedServer, ABC):
    """The part of a model server that is on the device, for whichever framework serves it.

    Attributes:
        requests: How many were counted.
        frees: Whether memory that is given up is freed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.requests = 0
        self.frees = True
        self.faults = Faults(options.faults)
        check(driver.cuInit(0))
        self._device = check(driver.cuDeviceGet(0))
        self._context = check(driver.cuDevicePrimaryCtxRetain(self._device))
        check(driver.cuCtxSetCurrent(self._context))
        self._weights, self._cache = Tensors(options.weights), Tensors(options.kv)
        self._weights.allocate()
        self._weights.load()
        self._cache.allocate()

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
        loads = b"reload_weights" in body or parts.path == "/update_weights_from_disk"
        if loads and self._weights.is_resident:
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

    @abstractmethod
    def framework_state(self) -> dict[str, object]:
        """What its framework says."""

    def state(self) -> dict[str, object]:
        """Who it is, and what it has."""
        return {
            "pid": os.getpid(),
            "requests": self.requests,
            "checksum": self._weights.checksum(),
            "cache": self._cache.is_resident,
            **self.framework_state(),
        }


class VllmModel(DeviceModel, VllmServer):
    """A vLLM server whose memory is the driver's."""

    def __init__(self, options: argparse.Namespace) -> None:
        DeviceModel.__init__(self, options)
        VllmServer.__init__(self, options.port)

    def framework_state(self) -> dict[str, object]:
        return {
            "sleeping": sorted(self.sleeping),
            "says_it_sleeps": self.says_it_sleeps,
            "in_flight": self.in_flight,
        }


class SglangModel(DeviceModel, SglangServer):
    """An SGLang server whose memory is the driver's."""

    def __init__(self, options: argparse.Namespace) -> None:
        DeviceModel.__init__(self, options)
        SglangServer.__init__(self, options.port)

    def framework_state(self) -> dict[str, object]:
        return {"sleeping": sorted(self.released)}


MODELS: Final = {"vllm": VllmModel, "sglang": SglangModel}


class ModelKernel:
    """The server as an application that saves itself: its checkpoint is its count of requests."""

    def __init__(self, server: DeviceModel) -> None:
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
    parsed.add_argument("--framework", choices=sorted(MODELS), default="vllm")
    parsed.add_argument("--kernel", action="store_true", help="be an application that saves itself")
    return parsed


def main() -> int:
    """Serves until it is told to end."""
    options = parser().parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopping.set())
    if Faults(options.faults).take("start"):
        return 3
    server = MODELS[options.framework](options)
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
