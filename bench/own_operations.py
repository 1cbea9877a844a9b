"""Operations of a worker in this process, with driver helpers, NVML, leases and the journal on disk."""

import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from leasehold.v1 import command_pb2, gpu_pb2, operation_pb2, workload_pb2
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.commands.journal_file import keep_workload
from leasehold_worker.commands.journal_records import workload_record
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import boot_id, send_signal
from leasehold_worker.workloads.messages import workload_message
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import RUNNING
from leasehold_worker.workloads.workload import Workload

MEMBERS: Final = Path(__file__).with_name("cuda_members.py")
START_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 10.0


class BenchmarkError(Exception):
    """A measured operation failed."""


@dataclass(frozen=True, slots=True)
class Worker:
    """The parts of a worker that carry out commands."""

    inventory: Inventory
    workloads: Workloads
    commands: Commands

    async def carry_out(self, workload_id: str, operation: operation_pb2.Operation) -> None:
        """Carries out one command, until its outcome is on disk."""
        outcome = await self.commands.carry_out(workload_id, operation)
        if outcome.state != command_pb2.COMMAND_STATE_SUCCEEDED:
            raise BenchmarkError(f"{operation.WhichOneof('kind')}: {outcome.error.message}")

    async def start(self, name: str, gpu_count: int, members: int, size: int) -> Workload:
        """Runs members of a benchmark, and waits until all hold their memory."""
        spec = workload_pb2.WorkloadSpec(
            arguments=[sys.executable, str(MEMBERS), "--members", str(members), "--bytes", str(size)],
            resources=workload_pb2.Resources(gpu_count=gpu_count),
        )
        run = operation_pb2.RunOperation(name=name, spec=spec)
        await self.carry_out(name, operation_pb2.Operation(run=run))
        workload = self.workloads.get(name)
        with trio.fail_after(START_TIMEOUT_S):
            while workload.output_path.read_text().count("ready") < members:
                if workload.ended.is_set():
                    raise BenchmarkError(f"the workload did not start: {workload.output_path.read_text()}")
                await trio.sleep(0.02)
        return workload

    async def suspend(self, workload: Workload) -> None:
        """Suspends a workload."""
        suspend = operation_pb2.SuspendOperation()
        await self.carry_out(workload.workload_id, operation_pb2.Operation(suspend=suspend))

    async def restore(self, workload: Workload) -> None:
        """Restores a workload on its previous GPUs."""
        restore = operation_pb2.RestoreOperation()
        await self.carry_out(workload.workload_id, operation_pb2.Operation(restore=restore))

    async def remap(self, workload: Workload, old: str, new: str) -> None:
        """Moves a workload from one GPU to another."""
        pairs = [gpu_pb2.GpuPair(old_uuid=old, new_uuid=new)]
        move = operation_pb2.Move(workload_id=workload.workload_id, pairs=pairs)
        remap = operation_pb2.RemapOperation(moves=[move])
        await self.carry_out(workload.workload_id, operation_pb2.Operation(remap=remap))

    async def stop(self, workload: Workload) -> None:
        """Ends a workload, which must still be running."""
        if workload.state != RUNNING or workload.ended.is_set():
            raise BenchmarkError(f"the workload is not running any more: {workload.output_path.read_text()}")
        send_signal(workload.root, signal.SIGTERM)
        await workload.ended.wait()


@asynccontextmanager
async def open_worker(folder: Path) -> AsyncIterator[Worker]:
    """Builds the worker's parts as its agent does, without a coordinator."""
    this_boot = boot_id()

    def keep(workload: Workload) -> None:
        statements = keep_workload(workload_record(workload, this_boot))
        journal.put(("workloads", workload.workload_id), statements)

    def told(workload_ids: Iterable[str]) -> list[workload_pb2.Workload]:
        known = (workload_id for workload_id in workload_ids if workload_id in parts.workloads)
        return [workload_message(parts.workloads.get(workload_id), "benchmark") for workload_id in known]

    async with (
        open_journal(folder / "journal.db") as journal,
        open_parts(WorkerConfig(), folder / "workloads", keep, written=journal.wait_written) as parts,
    ):
        if parts.driver.unavailable_reason is not None:
            raise BenchmarkError(f"no usable CUDA driver: {parts.driver.unavailable_reason}")
        try:
            carry_out = parts.operations.perform
            driver_version = parts.inventory.versions.driver_version
            commands = Commands(carry_out, journal, told, driver_version, parts.nursery, lambda _: None)
            yield Worker(parts.inventory, parts.workloads, commands)
        finally:
            # Not SIGKILL: a process that was restored may run, whose kill was seen to hang a host
            # (NVIDIA/cuda-checkpoint issue 53). The programs of this benchmark end of SIGTERM.
            for workload in parts.workloads.all():
                send_signal(workload.root, signal.SIGTERM)
            with trio.move_on_after(END_TIMEOUT_S, shield=True):
                for workload in parts.workloads.all():
                    await workload.ended.wait()
            for workload in parts.workloads.all():
                if workload.state != RUNNING:
                    send_signal(workload.root, signal.SIGKILL)  # only SIGKILL ends a suspended process
