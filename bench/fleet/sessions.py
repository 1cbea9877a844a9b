"""The session of one worker of a fleet: its frames, its changes in a watch, and its silence."""

import queue
import threading
import time

import grpc
from leasehold.v1 import command_pb2, fleet_service_pb2, fleet_service_pb2_grpc, worker_pb2
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest, ConnectResponse, WorkerLoad
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub

from bench.light_workers import hello, leases
from tests.channels import open_channel, open_worker_channel

PROBES = 200
PROBE_NUMBER = 900_000


class Probe:
    """One worker in this process, whose frames are timed."""

    def __init__(self, address: str) -> None:
        self._channel = open_worker_channel(address)
        self._up: queue.Queue[ConnectRequest | None] = queue.Queue()
        self._down: queue.Queue[ConnectResponse] = queue.Queue()
        self._sequence = 0
        self._up.put(hello(PROBE_NUMBER, 0))
        self._call = SessionServiceStub(self._channel).Connect(iter(self._up.get, None))
        threading.Thread(target=self._read, daemon=True).start()
        welcome = self._next("welcome").welcome
        self.session_id = welcome.session_id
        self.load_interval_s = welcome.load_interval.ToNanoseconds() / 1e9

    def _read(self) -> None:
        try:
            for frame in self._call:
                self._down.put(frame)
        except grpc.RpcError:
            pass

    def _next(self, kind: str) -> ConnectResponse:
        while True:
            frame = self._down.get(timeout=60)
            if frame.WhichOneof("frame") == kind:
                return frame

    def round_trip_s(self, number: int) -> float:
        """Seconds from the outcome of an unknown command to its acknowledgement."""
        began = time.perf_counter()
        update = CommandUpdate(command_id=f"probe-{number}", state=command_pb2.COMMAND_STATE_REJECTED)
        self._up.put(ConnectRequest(command_update=update))
        self._next("command_ack")
        return time.perf_counter() - began

    def tell_load(self, taken: int) -> None:
        """Sends a load with this number of leased GPUs."""
        self._sequence += 1
        load = WorkerLoad(
            session_id=self.session_id, sequence=self._sequence, gpu_leases=leases(PROBE_NUMBER, taken)
        )
        self._up.put(ConnectRequest(worker_load=load))

    def close(self) -> None:
        """Breaks the stream."""
        self._up.put(None)
        self._call.cancel()
        self._channel.close()


def time_watcher(address: str, probe: Probe) -> list[float]:
    """Latency of changes of a lease from the worker to a watcher."""
    times_s: list[float] = []
    with open_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        watch = fleet_service_pb2_grpc.FleetServiceStub(channel).WatchFleet(
            fleet_service_pb2.WatchFleetRequest()
        )
        changes = iter(watch)
        while not next(changes).bookmark.snapshot_end:
            pass
        uuid = leases(PROBE_NUMBER)[0].gpu_uuid
        for number in range(PROBES):
            began = time.perf_counter()
            probe.tell_load((number + 1) % 2)
            while next(changes).gpu.gpu.uuid != uuid:
                pass
            times_s.append(time.perf_counter() - began)
        watch.cancel()
    return times_s


def time_silence(address: str, probe: Probe) -> dict[str, float]:
    """Seconds after which a silent worker is STALE and LOST, with the limits of the rule."""
    stale_s, lost_s = 2.5 * probe.load_interval_s, max(4 * probe.load_interval_s, 20.0)
    probe.tell_load(0)
    began = time.monotonic()
    seen: dict[str, float] = {}
    with open_channel(address) as channel:
        stub = fleet_service_pb2_grpc.FleetServiceStub(channel)
        while "LOST" not in seen and time.monotonic() - began < 1.5 * lost_s + 30:
            worker = stub.GetWorker(
                fleet_service_pb2.GetWorkerRequest(worker=f"worker-{PROBE_NUMBER:06d}")
            ).worker
            state = worker_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
            seen.setdefault(state, round(time.monotonic() - began, 2))
            time.sleep(0.05)
    return {
        "stale_s": seen.get("STALE", -1.0),
        "stale_rule_s": stale_s,
        "lost_s": seen.get("LOST", -1.0),
        "lost_rule_s": lost_s,
    }
