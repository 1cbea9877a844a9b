"""A scripted coordinator with a fleet that is watched, and the page against it."""

import asyncio
import queue
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import (
    access_service_pb2,
    command_pb2,
    command_service_pb2,
    fleet_service_pb2,
    gpu_pb2,
    lease_pb2,
    plan_pb2,
    worker_pb2,
    workload_pb2,
    workload_service_pb2,
)
from leasehold.v1.access_service_pb2 import Role
from leasehold.v1.command_pb2 import Command
from leasehold.v1.gpu_pb2 import Gpu, GpuSample
from leasehold.v1.lease_pb2 import GpuLease, Lease, SlotState
from leasehold.v1.watch_pb2 import Bookmark
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec, WorkloadState, WorkloadStatus
from leasehold_client import AsyncClient
from leasehold_client.top.app import TopApp
from leasehold_client.top.contact import Contact
from textual.pilot import Pilot
from textual.widgets import Static

from tests.client.scripted_coordinator import ScriptedCoordinator, refuse

TIMEOUT_S = 40.0
NOW = Timestamp(seconds=int(time.time()))
FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED
CONNECTED = worker_pb2.WORKER_STATE_CONNECTED
SUSPENDED = workload_pb2.WORKLOAD_STATE_SUSPENDED
END_OF_SNAPSHOT = Bookmark(snapshot_end=True)


def worker(name: str = "alpha", gpus: int = 2, **fields: Any) -> Worker:
    """A connected worker."""
    given: dict[str, Any] = {
        "state": CONNECTED,
        "gpu_count": gpus,
        "free_gpu_count": 1,
        "last_seen_time": NOW,
    } | fields
    return Worker(worker_id=f"w-{name}", name=name, **given)


def gpu(
    slot: int, state: SlotState.ValueType = FREE, holder: str = "", worker: str = "alpha", **lease: Any
) -> FleetGpu:
    """A GPU of a worker, with measurements."""
    uuid = f"GPU-{worker}-{slot}"
    sample = GpuSample(
        sample_time=NOW,
        utilization_percent=97,
        memory_used_bytes=60 << 30,
        memory_total_bytes=80 << 30,
        temperature_celsius=71,
    )
    by: dict[str, Any] = {"workload_id": f"id-of-{holder}"} if holder else {}
    return FleetGpu(
        worker_id=f"w-{worker}",
        worker_name=worker,
        gpu=Gpu(uuid=uuid, slot=slot, name="NVIDIA H100"),
        lease=GpuLease(
            gpu_uuid=uuid,
            slot=slot,
            state=state,
            since=NOW,
            health=gpu_pb2.GPU_HEALTH_OK,
            sample=sample,
            **by,
            **lease,
        ),
        workload_name=holder or None,
    )


def workload(
    name: str,
    *gpu_uuids: str,
    state: WorkloadState.ValueType = workload_pb2.WORKLOAD_STATE_RUNNING,
    worker: str = "alpha",
    **status: Any,
) -> Workload:
    """A workload with a lease, or without one."""
    lease: dict[str, Any] = {"lease": Lease(gpu_uuids=gpu_uuids)} if gpu_uuids else {}
    told = WorkloadStatus(state=state, ready_time=NOW, **lease, **status)
    return Workload(
        workload_id=f"id-of-{name}",
        name=name,
        worker_id=f"w-{worker}",
        spec=WorkloadSpec(),
        status=told,
        create_time=NOW,
    )


def parked(name: str, worker: str = "alpha") -> Workload:
    """A suspended workload of one GPU."""
    return workload(
        name,
        state=SUSPENDED,
        worker=worker,
        parked_bytes=24 << 30,
        park_time=NOW,
        parked_gpu_uuids=[f"GPU-{worker}-1"],
    )


def command(command_id: str, workload_id: str = "id-of-one", **fields: Any) -> Command:
    """A suspend that runs."""
    given: dict[str, Any] = {
        "state": command_pb2.COMMAND_STATE_RUNNING,
        "phase": "checkpoint",
        "create_time": NOW,
    } | fields
    made = Command(command_id=command_id, workload_id=workload_id, worker_id="w-alpha", **given)
    made.operation.suspend.SetInParent()
    return made


@dataclass
class ScriptedFleet:
    """What the watches tell. A test changes it by :meth:`tell`."""

    scripted: ScriptedCoordinator
    fleet: list[Worker | FleetGpu] = field(default_factory=list)
    workloads: list[Workload] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    role: Role.ValueType = access_service_pb2.ROLE_ADMIN
    is_away: bool = False
    snapshots: int = 0
    _watchers: list["queue.Queue[Any]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = workload_service_pb2.PlanResponse(plan=plan_pb2.Plan(steps=["the driver moves the memory"]))
        self.scripted.answers |= {
            "WatchFleet": self._watch_fleet,
            "WatchWorkloads": self._watch_workloads,
            "WatchCommands": self._watch_commands,
            "WhoAmI": self._who_am_i,
            "ListGpus": self._list_gpus,
            "Plan": lambda request, context: plan,
        }

    def tell(self, change: Any) -> None:
        """Sends a change to every watch of its kind. None: ends all watches with INVALID_TOKEN."""
        for watcher in list(self._watchers):
            watcher.put(change)

    def away(self) -> None:
        """Refuses all calls, as if nobody listened, and breaks all watches."""
        self.is_away = True
        self.tell(None)

    def _gate(self, context: grpc.ServicerContext) -> None:
        if self.is_away:
            context.abort(grpc.StatusCode.UNAVAILABLE, "nobody listens")

    def _who_am_i(self, request: Any, context: grpc.ServicerContext) -> access_service_pb2.WhoAmIResponse:
        self._gate(context)
        return access_service_pb2.WhoAmIResponse(identity="user/eve", role=self.role)

    def _list_gpus(self, request: Any, context: grpc.ServicerContext) -> fleet_service_pb2.ListGpusResponse:
        self._gate(context)
        gpus = [one for one in self.fleet if isinstance(one, FleetGpu)]
        return fleet_service_pb2.ListGpusResponse(gpus=gpus)

    def _watch_fleet(
        self, request: fleet_service_pb2.WatchFleetRequest, context: grpc.ServicerContext
    ) -> Iterator[fleet_service_pb2.WatchFleetResponse]:
        response = fleet_service_pb2.WatchFleetResponse
        if "nope" in request.filter:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "no field is named 'nope'")

        def made(one: Any) -> fleet_service_pb2.WatchFleetResponse | None:
            match one:
                case Worker() if not request.filter:
                    return response(worker=one)
                case FleetGpu() if not request.filter or one.lease.state == FREE:  # the filter of the tests
                    return response(gpu=one)
                case _:
                    return None

        return self._watch(context, [told for one in self.fleet if (told := made(one))], made, response)

    def _watch_workloads(
        self, request: workload_service_pb2.WatchWorkloadsRequest, context: grpc.ServicerContext
    ) -> Iterator[workload_service_pb2.WatchWorkloadsResponse]:
        response = workload_service_pb2.WatchWorkloadsResponse
        if request.filter:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "no field of a workload")

        def made(one: Any) -> workload_service_pb2.WatchWorkloadsResponse | None:
            return response(workload=one) if isinstance(one, Workload) else None

        return self._watch(context, [made(one) for one in self.workloads], made, response)

    def _watch_commands(
        self, request: Any, context: grpc.ServicerContext
    ) -> Iterator[command_service_pb2.WatchCommandsResponse]:
        response = command_service_pb2.WatchCommandsResponse

        def made(one: Any) -> command_service_pb2.WatchCommandsResponse | None:
            return response(command=one) if isinstance(one, Command) else None

        return self._watch(context, [made(one) for one in self.commands], made, response)

    def _watch(
        self, context: grpc.ServicerContext, snapshot: list[Any], made: Callable[[Any], Any], response: Any
    ) -> Iterator[Any]:
        self._gate(context)
        self.snapshots += 1
        changes: queue.Queue[Any] = queue.Queue()
        self._watchers.append(changes)
        try:
            yield from snapshot
            yield response(bookmark=END_OF_SNAPSHOT, resume_token="1")
            while context.is_active():
                try:
                    change = changes.get(timeout=0.05)
                except queue.Empty:
                    continue
                if change is None:
                    self._gate(context)
                    refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TOKEN", "too old")
                elif (told := made(change)) is not None:
                    told.resume_token = "2"
                    yield told
        finally:
            self._watchers.remove(changes)


@dataclass
class Page:
    """The page on a terminal of some size."""

    app: TopApp
    pilot: "Pilot[None]"

    def text(self) -> str:
        """Everything that is shown, without styles."""
        width = self.app.size.width
        compositor = self.app.screen._compositor
        strips = compositor.render_strips()
        return "\n".join(strip.text[:width].rstrip() for strip in strips)

    def part(self, place: str) -> str:
        """One of the lines around the lists."""
        return str(self.app.screen_stack[0].query_one(f"#{place}", Static).content)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.text()
            await asyncio.sleep(0.02)

    async def shows(self, *texts: str) -> None:
        """Waits until all texts are shown."""
        await self.until(lambda: all(_joined(text) in _joined(self.text()) for text in texts))

    async def press(self, *keys: str) -> None:
        """Presses keys, one after the other."""
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Types a text."""
        names = {" ": "space", "=": "equals_sign", ":": "colon", "_": "underscore"}
        await self.pilot.press(*(names.get(letter, letter) for letter in text))


def _joined(text: str) -> str:
    return " ".join(text.split())


@asynccontextmanager
async def opened(address: str, width: int = 80, height: int = 24, wait: str = "live") -> AsyncGenerator[Page]:
    """The page of a coordinator, once it has the whole fleet, or another state of the connection."""
    contact = Contact(time.monotonic)
    async with AsyncClient(address, contact.failed) as client:
        contact.answered(await client.who_am_i())
        app = TopApp(client, contact, "eve@here")
        async with app.run_test(size=(width, height)) as pilot:
            page = Page(app, pilot)
            await page.until(lambda: page.part("connection").startswith(wait))
            yield page
