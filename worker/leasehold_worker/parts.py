"""The parts of a worker that carry out operations, built in one place."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from leasehold_worker.checkpoint.driver import Driver, open_driver
from leasehold_worker.checkpoint.rates import Rates
from leasehold_worker.config import WorkerConfig
from leasehold_worker.host_memory import HostMemory
from leasehold_worker.inventory import Inventory
from leasehold_worker.killing import Killer
from leasehold_worker.operations import Operations
from leasehold_worker.pool import GpuPool
from leasehold_worker.proof import Proof
from leasehold_worker.report import Report
from leasehold_worker.stopping import Stopping
from leasehold_worker.workloads import Workload, Workloads


@dataclass(frozen=True, slots=True)
class Parts:
    """What works on one host's GPUs.

    Attributes:
        driver: The driver.
        inventory: NVML.
        pool: The GPUs, and who leases which.
        host_memory: The ledger of promised host memory.
        rates: How long transfers take.
        proof: What NVML says of members.
        workloads: The registry.
        operations: Run, suspend, restore and remap.
        stopping: Stop.
        nursery: Where the workloads are watched.
    """

    driver: Driver
    inventory: Inventory
    pool: GpuPool
    host_memory: HostMemory
    rates: Rates
    proof: Proof
    workloads: Workloads
    operations: Operations
    stopping: Stopping
    nursery: trio.Nursery


@asynccontextmanager
async def open_parts(
    config: WorkerConfig,
    workloads_path: Path,
    observer: Callable[[Workload], None],
    on_forgotten: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Parts]:
    """Builds the parts. They end with the context; what is left in the nursery is cancelled.

    Args:
        config: The worker's settings.
        workloads_path: Where each workload gets a folder.
        observer: Told every change of a workload.
        on_forgotten: Told the id of an ended workload that is not remembered any longer.
    """
    inventory = await trio.to_thread.run_sync(Inventory)
    async with open_driver(config.driver_call_floor_s) as driver, trio.open_nursery() as nursery:
        pool = GpuPool([gpu.uuid for gpu in inventory.gpus])
        rates = Rates()
        killer = Killer(driver, inventory, rates)

        async def kill(workload: Workload) -> None:
            await killer.kill(workload, Report(lambda _: None))

        workloads = Workloads(pool, workloads_path, observer, on_forgotten, kill)
        host_memory = HostMemory(config.host_memory_reserve_bytes)
        proof = Proof(inventory, config.proof_timeout_s)
        operations = Operations(
            driver,
            inventory,
            pool,
            workloads,
            nursery,
            rates=rates,
            host_memory=host_memory,
            proof=proof,
        )
        stopping = Stopping(workloads, killer)
        yield Parts(
            driver, inventory, pool, host_memory, rates, proof, workloads, operations, stopping, nursery
        )
        nursery.cancel_scope.cancel()
