"""The worker as a whole: builds the parts and runs them in one nursery."""

import logging
import signal
from collections.abc import Iterable
from typing import Final

import trio
from leasehold.v1 import command_pb2, worker_session_pb2, workload_pb2
from leasehold.v1.worker_session_pb2 import CommandUpdate, ConnectRequest, WorkloadEvent

from leasehold_worker import wire
from leasehold_worker.commands import Commands
from leasehold_worker.config import WorkerConfig
from leasehold_worker.errors import OperationError
from leasehold_worker.link import Link
from leasehold_worker.parts import open_parts
from leasehold_worker.planning import Planning
from leasehold_worker.report import Report
from leasehold_worker.reports import Reporter, WorkerIdentity
from leasehold_worker.state_directory import StateDirectory
from leasehold_worker.stopping import Stopping
from leasehold_worker.workloads import ENDED, FAILED, RUNNING, Workload, Workloads

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S: Final = 60.0
"""How long a stop waits for commands that are under way."""


async def run_agent(config: WorkerConfig, state_directory: StateDirectory) -> None:
    """Runs the worker until SIGTERM or SIGINT, and then ends its workloads: nobody would find them again."""
    identity = WorkerIdentity.of_this_start(state_directory.worker_id(), config.name, config.labels)

    # The two observers reach the link, which is built from what they observe.
    def tell_workload(workload: Workload) -> None:
        message = wire.workload(workload, identity.worker_id)
        link.send(ConnectRequest(workload_event=WorkloadEvent(kind=_event_kind(workload), workload=message)))

    def tell_command(update: CommandUpdate) -> None:
        link.send(ConnectRequest(command_update=update))

    def workloads_of(workload_ids: Iterable[str]) -> list[workload_pb2.Workload]:
        return [message for id_ in workload_ids for message in reporter.workload(id_)]

    async with open_parts(config, state_directory.workloads_path, tell_workload) as parts:
        driver, inventory, pool, nursery = parts.driver, parts.inventory, parts.pool, parts.nursery
        if driver.unavailable_reason is not None:
            logger.warning("no usable CUDA driver: %s", driver.unavailable_reason)
        commands = Commands(
            parts.operations,
            parts.stopping,
            workloads_of,
            inventory.versions.driver_version,
            nursery,
            tell_command,
        )
        reporter = Reporter(identity, inventory, driver, pool, parts.workloads, commands)
        planning = Planning(parts.operations.preflight)
        link = Link(config.coordinator, state_directory, reporter, commands, parts.workloads, pool, planning)
        logger.info("worker %s (%s) with %d GPUs", identity.name, identity.worker_id, pool.capacity)
        nursery.start_soon(link.run)
        await _wait_for_stop_signal()
        nursery.start_soon(_stop_at_once_on_signal, nursery.cancel_scope)
        await _finish_commands(commands)
        await _stop_workloads(parts.stopping, parts.workloads)
        await link.leave(worker_session_pb2.GOODBYE_REASON_SHUTDOWN)


async def _wait_for_stop_signal() -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            logger.info("%s: stopping", signal.Signals(number).name)
            return


async def _stop_at_once_on_signal(scope: trio.CancelScope) -> None:
    await _wait_for_stop_signal()
    logger.error("stopped at once by a second signal: workloads may still run")
    scope.cancel()


async def _finish_commands(commands: Commands) -> None:
    commands.close()
    with trio.move_on_after(FINISH_TIMEOUT_S):
        await commands.wait_finished()


async def _stop_workloads(stopping: Stopping, workloads: Workloads) -> None:
    async def stop(workload: Workload) -> None:
        try:
            await stopping.stop(workload.workload_id, command_pb2.StopOperation(), Report(lambda _: None))
        except OperationError as error:
            logger.error("%s", error.message)

    async with trio.open_nursery() as nursery:
        for workload in workloads.all():
            if workload.state not in ENDED:
                nursery.start_soon(stop, workload)


def _event_kind(workload: Workload) -> worker_session_pb2.WorkloadEventKind.ValueType:
    if workload.state == FAILED:
        return worker_session_pb2.WORKLOAD_EVENT_KIND_FAILED
    if workload.state in ENDED:
        return worker_session_pb2.WORKLOAD_EVENT_KIND_EXITED
    if workload.state == RUNNING and workload.generation == 1:
        return worker_session_pb2.WORKLOAD_EVENT_KIND_STARTED
    return worker_session_pb2.WORKLOAD_EVENT_KIND_STATE_CHANGED
