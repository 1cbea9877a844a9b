"""The parts of a worker that perform operations, built in one place."""

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import trio

from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.applications.registry import ApplicationRegistry
from leasehold_worker.applications.timeouts import ApplicationTimeouts
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.image_store import ImageStore
from leasehold_worker.criu.compatibility import ImageHost
from leasehold_worker.criu.installation import probe
from leasehold_worker.criu.support import CriuSupport
from leasehold_worker.driver.helper_pool import Driver, open_driver
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.driver.verification import Verification
from leasehold_worker.errors import StartError
from leasehold_worker.files.secret_key import KEY_BYTES
from leasehold_worker.files.volume import Volume
from leasehold_worker.gpus.health_monitor import HealthMonitor
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.gpus.units import GpuUnits
from leasehold_worker.host.capacity import hard_limits, limits_within
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.host.processes import user_name
from leasehold_worker.leasing.allocation import Resources
from leasehold_worker.leasing.cordons import Cordons
from leasehold_worker.leasing.gpu_selection import PoolGpu
from leasehold_worker.leasing.host_reservations import HostReservations
from leasehold_worker.leasing.leases import Hold, Standing
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.leasing.suspend_memory import SuspendMemory
from leasehold_worker.moves.workload_hooks import HookFactory
from leasehold_worker.operations.acquisition import Acquisition
from leasehold_worker.operations.adoption import Adoption
from leasehold_worker.operations.cuda_suspend import CudaSuspend
from leasehold_worker.operations.exit_monitor import ExitMonitor
from leasehold_worker.operations.handler import Operations
from leasehold_worker.operations.image_checkpoint import ImageCheckpoint
from leasehold_worker.operations.keep_running import KeepRunning
from leasehold_worker.operations.kill import Killer
from leasehold_worker.operations.stop_restart import StopRestart
from leasehold_worker.operations.termination import Termination
from leasehold_worker.planning.durations import Durations
from leasehold_worker.planning.policy_checks import PolicyChecks
from leasehold_worker.planning.preflight import Preflight
from leasehold_worker.planning.tiers import Tiers
from leasehold_worker.programs.environment import inherited_environment
from leasehold_worker.programs.run_as import RunAs
from leasehold_worker.programs.secret_variables import SecretVariables
from leasehold_worker.workloads.disk_usage import DiskUsage
from leasehold_worker.workloads.foreign_processes import ForeignWatch
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.program_start import ProgramStart
from leasehold_worker.workloads.readiness import Readiness
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts for one host's GPUs, each described by its own class."""

    driver: Driver
    inventory: Inventory
    pool: GpuPool
    resources: Resources
    foreign: ForeignWatch
    health: HealthMonitor
    host_memory: SuspendMemory
    rates: Rates
    durations: Durations
    verification: Verification
    workloads: Workloads
    host_shares: HostShares
    limits: ResourceLimits
    secrets: SecretVariables
    programs: ProgramStart
    exit_monitor: ExitMonitor
    operations: Operations
    hook_factory: HookFactory
    applications: ApplicationRegistry
    stop_restart: StopRestart
    criu: CriuSupport
    image_checkpoint: ImageCheckpoint
    disk: CheckpointDirectory
    termination: Termination
    adoption: Adoption
    readiness: Readiness
    cordons: Cordons
    nursery: trio.Nursery
    """Runs the tasks of the parts."""


DIRECTORY_TIMEOUT_S: Final = 10.0
"""Timeout of the host's directory of users at the start. After that, a number is the worker's name."""


async def _own_name() -> str:
    with trio.move_on_after(DIRECTORY_TIMEOUT_S):
        return await trio.to_thread.run_sync(user_name, os.geteuid(), abandon_on_cancel=True)
    return str(os.geteuid())


@asynccontextmanager
async def open_parts(
    config: WorkerConfig,
    workloads_path: Path,
    observer: Callable[[Workload], None],
    on_forgotten: Callable[[str], None] = lambda _: None,
    keep_standing: Callable[[str, Standing], None] = lambda *_: None,
    worker_id: str = "",
    written: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    start_number: int = 0,
    keep_hold: Callable[[str, Hold | None], None] = lambda *_: None,
    secret_key: bytes | None = None,
    image_key: bytes = b"",
) -> AsyncIterator[Parts]:
    """Builds the parts. They end with the context, and tasks in the nursery are cancelled.

    Args:
        config: The worker's settings.
        workloads_path: Parent of the workloads' folders.
        observer: Receives every change of a workload.
        on_forgotten: Receives the id of a workload that is forgotten.
        keep_standing: Receives the changed standing of a GPU, and under "" that of the worker.
        worker_id: Id of the worker, which owns the images on disk.
        start_number: Number of the worker's starts.
        keep_hold: Receives the id of a changed hold, and the hold or None at its end.
        secret_key: Key of secret variables. None: one for the life of the parts.
        image_key: Key of the MACs of process images. Empty: they have none.
        written: Waits until all reported changes are on disk, or raises OperationError.

    Raises:
        StartError: A limit of the settings exceeds the host's, or the host has none of the named GPUs.
    """
    # Created now, because the free space of its volume is read before the first workload is started.
    try:
        await trio.to_thread.run_sync(partial(workloads_path.mkdir, parents=True, exist_ok=True))
    except OSError as error:
        raise StartError(
            f"the directory {workloads_path} can't be made ({error.strerror}): remove what is in its place"
        ) from error
    inventory = await trio.to_thread.run_sync(Inventory, config.gpus)
    if config.gpus and not inventory.gpus:
        raise StartError(
            "the setting gpus names no GPU of this host, which has "
            f"{', '.join(inventory.chips) or 'none'}: name some of these"
        )
    if inventory.missing:
        logger.error("this host lacks %s, which the setting gpus names", ", ".join(inventory.missing))
    async with open_driver(config.driver_call_floor_s) as driver, trio.open_nursery() as nursery:
        units = GpuUnits(config.gpu_units)
        pool = GpuPool(
            [
                PoolGpu(gpu.uuid, gpu.name, gpu.memory_total_bytes, units.of(gpu.name), gpu.numa_node)
                for gpu in inventory.gpus
            ],
            keep_standing,
            start_number,
            keep_hold,
        )
        nursery.start_soon(pool.holds.run)
        foreign = ForeignWatch(inventory, pool)
        rates = Rates()
        enforced = ResourceLimits.probe()
        killer = Killer(driver, inventory, rates, enforced.kill)
        workloads = Workloads(pool, workloads_path, observer)
        limits = limits_within(hard_limits(), config.cpu_limit_millicores, config.memory_limit_bytes)
        volume = Volume(workloads_path)
        await volume.look()
        nursery.start_soon(volume.run)
        ledger = HostReservations(
            limits,
            volume.space,
            workloads.parked_bytes,
            pool.note_host,
            config.disk_reserve_bytes,
        )
        host_shares = HostShares(ledger, enforced)
        exit_monitor = ExitMonitor(
            workloads, host_shares, foreign, killer, config.socket_path, on_forgotten, nursery
        )
        inherited = inherited_environment(config.inherited_variables)
        user = await _own_name()
        secrets = SecretVariables(secret_key or os.urandom(KEY_BYTES))
        run_as = RunAs(config.run_as, config.run_as_min_uid, coordinator=config.coordinator, user=user)
        programs = ProgramStart(
            workloads, enforced, inherited, config.socket_path, run_as, user, secrets, nursery
        )
        resources = Resources(pool, ledger)
        nursery.start_soon(DiskUsage(workloads, ledger).run)
        host_memory = SuspendMemory(
            config.host_memory_reserve_bytes,
            enforced.owns,
            config.parked_memory_limit_bytes,
            workloads.parked_bytes,
        )
        verification = Verification(inventory, config.proof_timeout_s)
        acquisition = Acquisition(inventory, pool, resources, workloads, foreign)
        termination = Termination(workloads, killer, exit_monitor)
        applications = ApplicationRegistry(workloads, nursery)
        hook_factory = HookFactory(
            workloads,
            verification,
            applications.of,
            applications.wait_served,
            written,
            inherited,
            secrets,
        )
        cuda_suspend = CudaSuspend(
            driver,
            inventory,
            pool,
            workloads,
            host_shares,
            hook_factory,
            rates=rates,
            host_memory=host_memory,
            verification=verification,
        )
        images = ImageStore(config.image_path, image_key)
        application_store = ApplicationStore(config.image_path, worker_id)
        disk = CheckpointDirectory(
            images,
            application_store,
            workloads,
            limit_bytes=config.checkpoint_limit_bytes,
            reserve_bytes=config.disk_reserve_bytes,
            keep_images=config.keep_images,
            expiry=timedelta(seconds=config.checkpoint_expiry_s),
            worker_id=worker_id,
        )
        image_host = ImageHost(worker_id, inventory)
        criu = CriuSupport(await probe(config.criu or None), images, host_memory, image_host)
        image_checkpoint = ImageCheckpoint(
            criu,
            images,
            disk,
            host_memory,
            image_host,
            driver,
            workloads,
            host_shares,
            exit_monitor,
            cuda_suspend,
            termination,
            nursery,
        )
        timeouts = ApplicationTimeouts(quiescence_s=config.kernel_quiescence_s, start_s=config.kernel_start_s)
        stop_restart = StopRestart(
            workloads,
            host_shares,
            exit_monitor,
            programs,
            applications,
            application_store,
            disk,
            termination,
            acquisition,
            timeouts,
        )
        tiers = Tiers(workloads, lambda: not criu.unavailable_reason)
        preflight = Preflight(
            driver,
            inventory,
            pool,
            workloads,
            foreign,
            host_memory,
            rates,
            verification,
            PolicyChecks(resources, applications, application_store, disk, criu, acquisition.may_claim),
            tiers,
        )
        adoption = Adoption(
            driver, inventory, pool, workloads, foreign, exit_monitor, config.adopt_users, run_as, user
        )
        health = HealthMonitor(inventory, pool.slots.set_health)
        cordons = Cordons(pool, health.look)
        durations = Durations()
        operations = Operations(
            workloads,
            acquisition,
            pool.holds,
            programs,
            exit_monitor,
            preflight=preflight,
            cuda_suspend=cuda_suspend,
            keep_running=KeepRunning(
                pool,
                workloads,
                host_shares,
                hook_factory,
                cuda_suspend,
                verification=verification,
                host_memory=host_memory,
            ),
            image_checkpoint=image_checkpoint,
            stop_restart=stop_restart,
            termination=termination,
            adoption=adoption,
            cordons=cordons,
            disk=disk,
            durations=durations,
        )
        yield Parts(
            driver=driver,
            inventory=inventory,
            pool=pool,
            resources=resources,
            foreign=foreign,
            health=health,
            host_memory=host_memory,
            rates=rates,
            durations=durations,
            verification=verification,
            workloads=workloads,
            host_shares=host_shares,
            limits=enforced,
            secrets=secrets,
            programs=programs,
            exit_monitor=exit_monitor,
            operations=operations,
            hook_factory=hook_factory,
            applications=applications,
            stop_restart=stop_restart,
            criu=criu,
            image_checkpoint=image_checkpoint,
            disk=disk,
            termination=termination,
            adoption=adoption,
            readiness=Readiness(workloads, foreign, hook_factory.probe),
            cordons=cordons,
            nursery=nursery,
        )
        nursery.cancel_scope.cancel()
