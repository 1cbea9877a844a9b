"""Many light workers in one process: real streams and frames, without a driver and processes.

Run as ``python bench/light_workers.py HOST:PORT COUNT FIRST``. Each worker has a connection of its own, sends
hello with eight GPUs and a load in every interval, answers every command at once, and reconnects like a real
worker. Every 0.2 s a line of JSON on standard output has the number of welcomed workers. With
``--echo-interval 5`` they send a load every 5 s to a bare echo server instead. With ``--credentials
DIRECTORY`` each has the certificate of the subdirectory with its name, and otherwise the token of workers.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from pathlib import Path

import grpc
import uvloop
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import command_pb2, lease_pb2, workload_pb2
from leasehold.v1.gpu_pb2 import Gpu, GpuSample
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.worker_pb2 import HostFacts
from leasehold.worker.v1.session_pb2 import (
    CommandSpec,
    CommandUpdate,
    ConnectRequest,
    ConnectResponse,
    Hello,
    ProtocolVersion,
    WorkerLoad,
)
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub

from tests.channels import open_aio_worker_channel

GPUS = 8
REPORT_S = 0.2
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 8.0
OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", 262_144),
    ("grpc.max_send_message_length", 262_144),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Channel options of a real worker. A copy, since the light workers also run with older commits."""

ECHO = "/bench.Echo/Echo"


def name_of(number: int) -> str:
    """Name of a worker."""
    return f"light-{number:06d}"


def leases(number: int, taken: int = 0) -> list[GpuLease]:
    """Lease entries of a worker's GPUs, with all fields of real entries. The first GPUs are leased."""
    return [
        GpuLease(
            gpu_uuid=f"GPU-{number:08x}-0000-4000-8000-{slot:012x}",
            slot=slot,
            state=lease_pb2.SLOT_STATE_LEASED if slot < taken else lease_pb2.SLOT_STATE_FREE,
            sample=GpuSample(
                utilization_percent=random.randrange(100),
                memory_used_bytes=random.randrange(2**36),
                memory_total_bytes=2**36,
                temperature_celsius=60,
            ),
        )
        for slot in range(GPUS)
    ]


def hello(number: int, epoch: int) -> ConnectRequest:
    """The first frame of a worker."""
    entries = leases(number)
    return ConnectRequest(
        hello=Hello(
            worker_id=f"worker-{number:06d}",
            name=name_of(number),
            instance_id=f"instance-{number}",
            boot_id=f"boot-{number}",
            last_epoch=epoch,
            protocol_version=ProtocolVersion(major=1, minor=1),
            agent_version="bench",
            host=HostFacts(hostname=f"host-{number}", cpu_count=64, memory_total_bytes=2**40),
            gpus=[
                Gpu(uuid=lease.gpu_uuid, slot=lease.slot, name="H100", memory_total_bytes=2**36)
                for lease in entries
            ],
            gpu_leases=entries,
        )
    )


Call = grpc.aio.StreamStreamCall[ConnectRequest, ConnectResponse]


class LightWorker:
    """One worker."""

    def __init__(
        self, address: str, number: int, load_interval_s: float = 0.0, credentials: Path | None = None
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._number = number
        self._epoch = 0
        self._sequence = 0
        self._load_interval_s = load_interval_s
        self._writing = asyncio.Lock()
        """Prevents two concurrent writes, which would end the call."""
        self.welcomed = False
        self.sessions = 0

    async def run(self) -> None:
        """Holds one session after the other, on one channel."""
        backoff_s = BACKOFF_MIN_S
        async with self._open_channel() as channel:
            while True:
                began = time.monotonic()
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._session(channel)
                self.welcomed = False
                if time.monotonic() - began > 60:
                    backoff_s = BACKOFF_MIN_S
                await asyncio.sleep(random.uniform(0, backoff_s))
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _open_channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return open_aio_worker_channel(self._address, OPTIONS)
        own = self._credentials / name_of(self._number)
        files = (own / name for name in ("ca.pem", "worker.key", "worker.pem"))
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        return grpc.aio.secure_channel(self._address, credentials, options=OPTIONS)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        call: Call = SessionServiceStub(channel).Connect()
        await call.write(hello(self._number, self._epoch))
        ticking: asyncio.Task[None] | None = None
        try:
            while isinstance(frame := await call.read(), ConnectResponse):
                match frame.WhichOneof("frame"):
                    case "welcome":
                        self._epoch = frame.welcome.epoch
                        self.welcomed = True
                        self.sessions += 1
                        self._load_interval_s = _seconds(frame.welcome.load_interval)
                        ticking = asyncio.create_task(self._tick(call, frame.welcome.session_id))
                    case "heartbeat":
                        if frame.heartbeat.HasField("load_interval"):
                            self._load_interval_s = _seconds(frame.heartbeat.load_interval)
                    case "command":
                        await self._obey(call, frame.command.command)
        finally:
            call.cancel()
            if ticking is not None:
                ticking.cancel()

    async def _tick(self, call: Call, session_id: str) -> None:
        await asyncio.sleep(random.uniform(0, self._load_interval_s))
        while True:
            self._sequence += 1
            load = WorkerLoad(session_id=session_id, sequence=self._sequence, gpu_leases=leases(self._number))
            async with self._writing:
                await call.write(ConnectRequest(worker_load=load))
            await asyncio.sleep(self._load_interval_s * random.uniform(0.9, 1.1))

    async def _obey(self, call: Call, command: CommandSpec) -> None:
        workload = workload_pb2.Workload(
            workload_id=command.workload_id,
            name=command.operation.run.name,
            status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_EXITED, generation=2),
        )
        for state in (
            command_pb2.COMMAND_STATE_ACCEPTED,
            command_pb2.COMMAND_STATE_RUNNING,
            command_pb2.COMMAND_STATE_SUCCEEDED,
        ):
            ended = state == command_pb2.COMMAND_STATE_SUCCEEDED
            update = CommandUpdate(
                command_id=command.command_id, state=state, workloads=[workload] if ended else []
            )
            async with self._writing:
                await call.write(ConnectRequest(command_update=update))


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


class EchoWorker(LightWorker):
    """Sends the same load to an echo server."""

    def _open_channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, options=OPTIONS)  # an echo server has no TLS

    async def _session(self, channel: grpc.aio.Channel) -> None:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(ECHO)()
        self.welcomed = True
        await asyncio.sleep(random.uniform(0, self._load_interval_s))
        while True:
            self._sequence += 1
            load = WorkerLoad(session_id="echo", sequence=self._sequence, gpu_leases=leases(self._number))
            await call.write(ConnectRequest(worker_load=load).SerializeToString())
            await call.read()
            await asyncio.sleep(self._load_interval_s * random.uniform(0.9, 1.1))


async def main() -> None:
    """Runs until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("count", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument(
        "--echo-interval", type=float, metavar="SECONDS", help="seconds between two loads to an echo server"
    )
    parser.add_argument("--credentials", type=Path, metavar="DIRECTORY", help="certificates of the workers")
    options = parser.parse_args()
    workers: list[LightWorker] = []
    for number in range(options.first, options.first + options.count):
        if options.echo_interval is None:
            workers.append(LightWorker(options.address, number, credentials=options.credentials))
        else:
            workers.append(EchoWorker(options.address, number, options.echo_interval))
    async with asyncio.TaskGroup() as tasks:
        for number, worker in enumerate(workers):
            tasks.create_task(worker.run())
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        while True:
            welcomed = sum(worker.welcomed for worker in workers)
            sys.stdout.write(json.dumps({"welcomed": welcomed}) + "\n")
            sys.stdout.flush()
            await asyncio.sleep(REPORT_S)


if __name__ == "__main__":
    uvloop.run(main())
