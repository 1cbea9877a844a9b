"""The parts of a worker that carry out operations, built in one place."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from leasehold_worker.adopting import Adopting
from leasehold_worker.checkpoint.driver import Driver, open_driver
from leasehold_worker.checkpoint.rates import Rates
from leasehold_worker.config import WorkerConfig
from leasehold_worker.foreign import ForeignWatch
from leasehold_worker.gpu_choice import PoolGpu
from leasehold_worker.gpu_units import GpuUnits
from leasehold_worker.health_monitor import HealthMonitor
from leasehold_worker.host_ledger import HostLedger
from leasehold_worker.host_memory import HostMemory
from leasehold_worker.inventory import Inventory
from leasehold_worker.killing import Killer
from leasehold_worker.leases import Standing
from leasehold_worker.machine import disk_space, hard_limits, limits_within
from leasehold_worker.operations import Operations
from leasehold_worker.pool import GpuPool
from leasehold_worker.proof import Proof
from leasehold_worker.report import Report
from leasehold_worker.resource_limits import ResourceLimits
from leasehold_worker.resources import Resources
from leasehold_worker.servicing import Servicing
from leasehold_worker.stopping import Stopping
from leasehold_worker.taking import Taking
from leasehold_worker.workloads import Workload, Workloads, parked_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """What works on one host's GPUs.

    Attributes:
        driver: The driver.
        inventory: NVML.
        pool: The GPUs, and who leases which.
        resources: What workloads may have of the host.
        foreign: Who else is on the GPUs.
        health: Looks after the GPUs.
        host_memory: The ledger of promised host memory.
        rates: How long transfers take.
        proof: What NVML says of members.
        workloads: The registry.
        operations: Run, suspend, restore and remap.
        stopping: Stop.
        adopting: Adopt and release.
        servicing: Cordon, uncordon and the reset of a GPU's health.
        nursery: Where the workloads are watched.
    """

    driver: Driver
    inventory: Inventory
    pool: GpuPool
    resources: Resources
    foreign: ForeignWatch
    health: HealthMonitor
    host_memory: HostMemory
    rates: Rates
    proof: Proof
    workloads: Workloads
    operations: Operations
    stopping: Stopping
    adopting: Adopting
    servicing: Servicing
    nursery: trio.Nursery


@asynccontextmanager
async def open_parts(
    config: WorkerConfig,
    workloads_path: Path,
    observer: Callable[[Workload], None],
    on_forgotten: Callable[[str], None] = lambda _: None,
    keep_standing: Callable[[str, Standing], None] = lambda *_: None,
) -> AsyncIterator[Parts]:
    """Builds the parts. They end with the context; what is left in the nursery is cancelled.

    Args:
        config: The worker's settings.
        workloads_path: Where each workload gets a folder.
        observer: Told every change of a workload.
        on_forgotten: Told the id of an ended workload that is not remembered any longer.
        keep_standing: Told what is held against a GPU, or under "" against the worker, when it is another.

    Raises:
        StartError: A limit of the settings is above what the host has.
    """
    inventory = await trio.to_thread.run_sync(Inventory)
    async with open_driver(config.driver_call_floor_s) as driver, trio.open_nursery() as nursery:
        units = GpuUnits(config.gpu_units)
        pool = GpuPool(
            [
                PoolGpu(gpu.uuid, gpu.name, gpu.memory_total_bytes, units.of(gpu.name), gpu.numa_node)
                for gpu in inventory.gpus
            ],
            keep_standing,
        )
        foreign = ForeignWatch(inventory, pool)
        rates = Rates()
        killer = Killer(driver, inventory, rates)

        async def kill(workload: Workload) -> None:
            await killer.kill(workload, Report(lambda _: None))

        async def look_without(workload: Workload) -> None:
            await foreign.look(workloads, leaving=workload)

        limits = limits_within(hard_limits(), config.cpu_limit_millicores, config.memory_limit_bytes)
        ledger = HostLedger(
            limits,
            partial(disk_space, workloads_path),
            disk_reserve_bytes=config.disk_reserve_bytes,
            parked_bytes=lambda: sum(map(parked_bytes, workloads.all())),
        )
        enforced = ResourceLimits.probe()
        workloads = Workloads(
            pool,
            workloads_path,
            observer,
            on_forgotten,
            kill,
            look_without,
            ledger,
            enforced,
            config.socket_path,
        )
        resources = Resources(pool, ledger)
        host_memory = HostMemory(config.host_memory_reserve_bytes, enforced.owns)
        proof = Proof(inventory, config.proof_timeout_s)
        operations = Operations(
            driver,
            inventory,
            pool,
            workloads,
            Taking(inventory, pool, resources, workloads, foreign),
            nursery,
            rates=rates,
            host_memory=host_memory,
            proof=proof,
        )
        stopping = Stopping(workloads, killer)
        adopting = Adopting(driver, inventory, pool, workloads, foreign, nursery, config.adopt_users)
        health = HealthMonitor(inventory, pool.set_health)
        servicing = Servicing(pool, health.look)
        yield Parts(
            driver=driver,
            inventory=inventory,
            pool=pool,
            resources=resources,
            foreign=foreign,
            health=health,
            host_memory=host_memory,
            rates=rates,
            proof=proof,
            workloads=workloads,
            operations=operations,
            stopping=stopping,
            adopting=adopting,
            servicing=servicing,
            nursery=nursery,
        )
        nursery.cancel_scope.cancel()
