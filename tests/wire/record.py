"""Records the frames and calls of the older release, as root, on a host whose name says nothing:

    unshare --uts sh -c 'hostname host-1 && exec python -m tests.wire.record'

Coordinator, worker and client are processes of a real checkout of the older release. A proxy between them
writes down each message. Paths and versions of this machine are replaced by others of the same length, so all
lengths on the wire stay as they were.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool
from leasehold_simgpu import SimulatedHost, Timing

from tests import environment, prefork
from tests.channels import open_channel, open_worker_channel, server_credentials
from tests.integration.fleets import LEASEHOLD, ROOMS, Fleet, make_fleet
from tests.older_release import unpack_older
from tests.wire.program import write_counter
from tests.wire.recording import (
    CONNECT,
    COUNTER,
    GPU_COUNT,
    GPU_SEED,
    STATUS_KEY,
    Event,
    Kind,
    save,
    status_of,
)

PAUSE_S: Final = 1.0

BEFORE_THE_RESTART: Final = (
    "get workers",
    "get gpus",
    f"run --worker alpha --gpus 1 --name one -- {COUNTER}",
    f"run --worker alpha --gpus 1 --name two -- {COUNTER}",
    f"run --worker alpha --gpus 1 --name two -- {COUNTER}",  # the name is taken
    "get workloads",
    "get gpus",
    "logs one",
    "label workload one team=vision",
    "suspend one --dry-run",
    "suspend one",
    "suspend one",  # it is suspended already
    "get workloads",
    "get gpus",
    "restore one",
    "remap --swap one two --dry-run",
    "remap --swap one two",
    "get workloads",
    "get gpus",
    "get checkpoints",
    "cordon alpha/0 --reason maintenance",
    "uncordon alpha/0",
    "suspend two",
)
AFTER_THE_RESTART: Final = (
    "get workloads",
    "get gpus",
    "restore two",
    "checkpoint two",  # the program serves no kernel
    "stop one",
    "stop two",
    "get workloads --all",
    "get commands",
    "get events",
)


class RecordingProxy(grpc.GenericRpcHandler):
    """Forwards sessions and calls to a coordinator, and records their messages."""

    def __init__(self, address: str, worker_address: str) -> None:
        self.events: list[Event] = []
        self._calls = 0
        # Any: the types of gRPC know no calls with bytes.
        self._channel: Any = open_channel(address)
        self._worker_channel: Any = open_worker_channel(worker_address)
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', server_credentials())}"
        self._server.start()

    def pause(self) -> None:
        """Waits until no message comes."""
        count = -1
        while count < len(self.events):
            count = len(self.events)
            time.sleep(PAUSE_S)
        self.events.append(Event(Kind.PAUSE))

    def stop(self) -> None:
        """Ends all sessions and calls."""
        self._server.stop(None).wait(10)
        self._channel.close()
        self._worker_channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        """Forwards a call of any method."""
        path = handler_call_details.method
        if path == CONNECT:
            return grpc.stream_stream_rpc_method_handler(self._session)
        full_name = path.removeprefix("/").replace("/", ".")
        method = descriptor_pool.Default().FindMethodByName(full_name)

        def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._answer(path, request, context, is_stream=method.server_streaming)

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(answer)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: next(answer(request, context)))

    def _session(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        def up() -> Iterator[bytes]:
            for frame in frames:
                self.events.append(Event(Kind.UP, frame))
                yield frame

        self.events.append(Event(Kind.CONNECT))
        call = self._worker_channel.stream_stream(CONNECT)(up())
        context.add_callback(call.cancel)
        with suppress(grpc.RpcError):
            for frame in call:
                self.events.append(Event(Kind.DOWN, frame))
                yield frame

    def _answer(
        self, path: str, request: bytes, context: grpc.ServicerContext, *, is_stream: bool
    ) -> Iterator[bytes]:
        self._calls += 1
        number = self._calls
        self.events.append(Event(Kind.REQUEST, request, number, path))
        try:
            if is_stream:
                responses = self._channel.unary_stream(path)(request)
                context.add_callback(responses.cancel)
            else:
                responses = iter([self._channel.unary_unary(path)(request, timeout=60)])
            for response in responses:
                self.events.append(Event(Kind.RESPONSE, response, number, path))
                yield response
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:  # the client has what it wanted
                return
            status = status_of(error)
            self.events.append(Event(Kind.REFUSAL, status, number, path))
            context.set_trailing_metadata(((STATUS_KEY, status),))
            context.abort(error.code(), error.details() or "")


def use(fleet: Fleet, proxy: RecordingProxy, verbs: Sequence[str]) -> None:
    """Runs verbs of the older client, with pauses between them. Refused ones are recorded too."""
    for verb in verbs:
        proxy.pause()
        path = os.pathsep.join(str(fleet.checkout / room) for room in ROOMS if fleet.checkout)
        variables = {**os.environ, "LEASEHOLD_COORDINATOR": proxy.address, "PYTHONPATH": path}
        done = subprocess.run(
            [*LEASEHOLD, *verb.split()],
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        print(f"{verb}: {done.returncode} {(done.stderr.strip().splitlines() or [''])[-1]}")


def record(folder: Path) -> list[Event]:
    """The events of a fleet of the older release."""
    older = unpack_older(folder / "older")
    os.environ["PATH"] = f"{write_counter(folder)}{os.pathsep}{os.environ['PATH']}"
    with make_fleet(folder, checkout=older) as fleet:
        direct = fleet.worker_address
        proxy = RecordingProxy(fleet.address, direct)
        fleet.worker_address = proxy.address
        host = SimulatedHost.create(
            folder / "alpha-host", gpus=GPU_COUNT, chip="H100", timing=Timing.instant(), seed=GPU_SEED
        )
        fleet.hosts["alpha"] = host
        settings = 'stop_workloads = "leave"\n'
        fleet.start_worker("alpha", settings=settings)
        use(fleet, proxy, BEFORE_THE_RESTART)
        fleet.end("alpha", signal.SIGTERM)
        fleet.start_worker("alpha", settings=settings)
        use(fleet, proxy, AFTER_THE_RESTART)
        fleet.end("alpha", signal.SIGTERM)
        fleet.worker_address = direct
        proxy.stop()
    return proxy.events


def without_names(events: Sequence[Event], folder: Path) -> list[Event]:
    """The events without names of this machine. All lengths stay."""
    names = [os.uname().release, str(folder), sys.prefix]
    names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    replaced = []
    for event in events:
        content = event.content
        for name in names:
            content = content.replace(name.encode(), re.sub(r"[a-z0-9]", "0", name).encode())
        replaced.append(Event(event.kind, content, event.call, event.method))
    return replaced


def main() -> None:
    """Records, and writes the file."""
    run_folder = environment.set_up(gpus=False)
    try:
        with tempfile.TemporaryDirectory(dir=run_folder) as folder:
            events = without_names(record(Path(folder)), Path(folder))
    finally:
        prefork.stop()
        environment.tear_down(run_folder)
    print(f"{len(events)} events, {save(events)} bytes")


if __name__ == "__main__":
    main()
