"""The fleet as watches and lists tell it: workers, GPUs, open workloads and commands. Pure."""

from collections.abc import Iterable
from typing import Final, final

from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.gpu_pb2 import GpuSample
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse

from leasehold_client.aio.command_watch import has_ended
from leasehold_client.aio.workload_watch import ENDED
from leasehold_client.arguments.gpu_names import gpu_places
from leasehold_client.messages import workload_targets
from leasehold_client.top.entries import Entries

ENDED_COMMANDS_LIMIT: Final = 20
"""Number of the newest ended commands that stay."""

ENDED_NAMES_LIMIT: Final = 1000
"""Number of ended workloads whose names stay, for the commands about them."""


@final
class FleetModel:
    """The state of the fleet as the watches told it.

    Messages are replaced and never changed, so a view may keep them.

    Attributes:
        workers: Workers by id.
        gpus: GPUs by UUID.
        workloads: Workloads that have not ended, by id.
        commands: Commands that have not ended, by id.
        ended_commands: The newest ended commands by id, the oldest first.
        revision: Incremented with each change that a view may show.
    """

    def __init__(self) -> None:
        self.workers: Entries[Worker] = Entries()
        self.gpus: Entries[FleetGpu] = Entries()
        self.workloads: Entries[Workload] = Entries()
        self.commands: Entries[Command] = Entries()
        self.ended_commands: dict[str, Command] = {}
        self.revision = 0
        self._ended_names: dict[str, str] = {}
        self._samples: dict[str, GpuSample] = {}

    @property
    def is_complete(self) -> bool:
        """Whether each watch has told its whole snapshot."""
        return all(one.is_complete for one in (self.gpus, self.workloads, self.commands))

    def begin_snapshots(self) -> None:
        """All watches begin with a snapshot."""
        self.begin_fleet()
        self.begin_workloads()
        self.begin_commands()

    def begin_fleet(self) -> None:
        """A watch of the fleet begins with a snapshot."""
        self.workers.begin_snapshot()
        self.gpus.begin_snapshot()
        self.revision += 1

    def begin_workloads(self) -> None:
        """A watch of workloads begins with a snapshot."""
        self.workloads.begin_snapshot()
        self.revision += 1

    def begin_commands(self) -> None:
        """A watch of commands begins with a snapshot."""
        self.commands.begin_snapshot()
        self.revision += 1

    def fold_fleet(self, response: WatchFleetResponse) -> None:
        """Takes a response of WatchFleet."""
        match response.WhichOneof("change"):
            case "worker":
                self.workers.put(response.worker.worker_id, response.worker)
            case "gpu":
                self.gpus.put(response.gpu.gpu.uuid, response.gpu)
                self._take_sample(response.gpu)
            case "deleted_worker_id":
                self.workers.remove(response.deleted_worker_id)
            case "deleted_gpu_uuid":
                self.gpus.remove(response.deleted_gpu_uuid)
                self._samples.pop(response.deleted_gpu_uuid, None)
            case "bookmark" if response.bookmark.snapshot_end:
                self.workers.end_snapshot()
                self.gpus.end_snapshot()
                known = self.gpus.values
                self._samples = {uuid: one for uuid, one in self._samples.items() if uuid in known}
        self.revision += 1

    def fold_workloads(self, response: WatchWorkloadsResponse) -> None:
        """Takes a response of WatchWorkloads. A workload that has ended is forgotten, except for its name."""
        match response.WhichOneof("change"):
            case "workload" if response.workload.status.state in ENDED:
                workload = response.workload
                self.workloads.remove(workload.workload_id)
                self._ended_names[workload.workload_id] = workload.name
                _bound(self._ended_names, ENDED_NAMES_LIMIT)
            case "workload":
                self.workloads.put(response.workload.workload_id, response.workload)
            case "deleted_workload_id":
                self.workloads.remove(response.deleted_workload_id)
            case "bookmark" if response.bookmark.snapshot_end:
                self.workloads.end_snapshot()
        self.revision += 1

    def fold_commands(self, response: WatchCommandsResponse) -> None:
        """Takes a response of WatchCommands."""
        match response.WhichOneof("change"):
            case "command":
                self.put_command(response.command)
            case "deleted_command_id":
                self.commands.remove(response.deleted_command_id)
                self.ended_commands.pop(response.deleted_command_id, None)
            case "bookmark" if response.bookmark.snapshot_end:
                self.commands.end_snapshot()
        self.revision += 1

    def put_command(self, command: Command) -> None:
        """Takes a state of a command, unless a newer one is known. The newest ended commands stay."""
        if not has_ended(command.state):
            known = self.commands.values.get(command.command_id, command)
            if command.command_id not in self.ended_commands and command.revision >= known.revision:
                self.commands.put(command.command_id, command)
            return
        self.commands.remove(command.command_id)
        self.ended_commands.pop(command.command_id, None)
        self.ended_commands[command.command_id] = command
        _bound(self.ended_commands, ENDED_COMMANDS_LIMIT)
        self.revision += 1

    def take_samples(self, gpus: Iterable[FleetGpu]) -> None:
        """Takes the measurements of a list, and ignores its leases, which may be older than the watch."""
        for gpu in gpus:
            if gpu.gpu.uuid in self.gpus.values:
                self._take_sample(gpu)
        self.revision += 1

    def sample(self, uuid: str) -> GpuSample:
        """The newest measurements of a GPU. Without fields: unknown."""
        return self._samples.get(uuid, _NO_SAMPLE)

    def gpus_by_worker(self) -> dict[str, list[FleetGpu]]:
        """The GPUs of each worker that has some, by slot."""
        found: dict[str, list[FleetGpu]] = {}
        for gpu in self.gpus.values.values():
            found.setdefault(gpu.worker_id, []).append(gpu)
        for gpus in found.values():
            gpus.sort(key=lambda one: one.gpu.slot)
        return found

    def places(self) -> dict[str, str]:
        """Short names of GPUs, worker/slot, by UUID."""
        return gpu_places(self.gpus.values.values())

    def workload_name(self, workload_id: str) -> str:
        """The name of a workload, or its id if the name is not known."""
        if (workload := self.workloads.values.get(workload_id)) is not None:
            return workload.name
        return self._ended_names.get(workload_id, workload_id)

    def worker_name(self, worker_id: str) -> str:
        """The name of a worker, or its id if the name is not known."""
        worker = self.workers.values.get(worker_id)
        return worker.name if worker is not None else worker_id

    def open_command(self, workload_id: str) -> Command | None:
        """The oldest open command about a workload."""
        found = (one for one in self.commands.values.values() if workload_id in workload_targets(one))
        return min(found, key=lambda one: one.create_time.ToNanoseconds(), default=None)

    def _take_sample(self, gpu: FleetGpu) -> None:
        if not gpu.lease.HasField("sample"):
            self._samples.pop(gpu.gpu.uuid, None)
            return
        sample, known = gpu.lease.sample, self.sample(gpu.gpu.uuid)
        if sample.sample_time.ToNanoseconds() >= known.sample_time.ToNanoseconds():
            self._samples[gpu.gpu.uuid] = sample


_NO_SAMPLE: Final = GpuSample()


def _bound(kept: dict[str, Command] | dict[str, str], limit: int) -> None:
    """Drops the oldest entries beyond the limit."""
    while len(kept) > limit:
        del kept[next(iter(kept))]
