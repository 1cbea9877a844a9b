"""The worker as a whole: builds the parts and runs them in one nursery."""

import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Final

import trio
from leasehold.v1 import operation_pb2
from leasehold.v1.operation_pb2 import Operation
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import ConnectRequest

from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import StopWorkloads, WorkerConfig
from leasehold_worker.agent.gauges import WorkerGauges
from leasehold_worker.agent.gpu_locks import hold_gpus
from leasehold_worker.agent.records import Records
from leasehold_worker.agent.recovery import Recovery
from leasehold_worker.agent.strays import Strays
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.driver.driver_wait import wait_for_driver
from leasehold_worker.files.secret_key import IMAGES_FILE, open_key
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.host.clock_offset import ClockOffset
from leasehold_worker.host.service_manager import ServiceManager
from leasehold_worker.local_api.claim_waiting import ClaimWaiting
from leasehold_worker.local_api.claims import LocalClaims
from leasehold_worker.local_api.health_port import serve_health
from leasehold_worker.local_api.metrics_port import serve_metrics
from leasehold_worker.local_api.metrics_tls import MetricsTls
from leasehold_worker.local_api.queries import LocalQueries
from leasehold_worker.local_api.service import serve_locally
from leasehold_worker.local_api.unix_socket import LocalSocket
from leasehold_worker.operations.hook_retries import HookRetries
from leasehold_worker.operations.preemption import Preemption
from leasehold_worker.programs.output_bounds import bound_outputs
from leasehold_worker.session.frame_sink import FrameSink
from leasehold_worker.session.plan_query import PlanQueries
from leasehold_worker.session.queries import Queries
from leasehold_worker.session.renewal import Renewal
from leasehold_worker.session.reporter import Reporter, WorkerIdentity
from leasehold_worker.session.session import CoordinatorSession
from leasehold_worker.workloads.messages import workload_messages
from leasehold_worker.workloads.states import ENDED, RUNNING
from leasehold_worker.workloads.workload import LET_GO, Workload

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S: Final = 60.0
"""Time that a stop waits for running commands."""

SETTLE_TIMEOUT_S: Final = 10.0
"""Time that a stop waits for the journal's disk."""


async def run_agent(config: WorkerConfig, state_directory: StateDirectory) -> None:
    """Runs the worker until SIGTERM, SIGINT or SIGHUP.

    Its workloads keep running, unless the settings say otherwise.

    Raises:
        StartError: The journal can't be used, or another worker serves a GPU.
    """
    with closing(LocalSocket(config.socket_path, config.socket_group)) as local_socket, ExitStack() as locks:
        await _run(config, state_directory, local_socket, locks)


async def _run(
    config: WorkerConfig, state_directory: StateDirectory, local_socket: LocalSocket, locks: ExitStack
) -> None:
    manager = ServiceManager.of_environment()
    async with open_journal(state_directory.journal_path) as journal:
        identity = WorkerIdentity.of_this_start(state_directory.worker_id(), config.name, config.labels)
        frames = FrameSink()
        records = Records(journal, frames, identity.worker_id)
        workloads_path = state_directory.workloads_path
        worker_id = identity.worker_id
        async with open_parts(
            config,
            workloads_path,
            records.keep_workload,
            records.forget_workload,
            records.keep_standing,
            worker_id,
            journal.wait_written,
            state_directory.count_start(),
            records.keep_hold,
            await trio.to_thread.run_sync(open_key, state_directory.keys_path),
            await trio.to_thread.run_sync(open_key, state_directory.keys_path, IMAGES_FILE),
        ) as parts:
            # Before anything is granted, started or settled.
            locks.enter_context(hold_gpus([gpu.uuid for gpu in parts.inventory.gpus]))
            driver, inventory, pool, nursery = parts.driver, parts.inventory, parts.pool, parts.nursery
            if driver.unavailable_reason is not None:
                logger.warning("no usable CUDA driver, and trying again: %s", driver.unavailable_reason)
            commands = Commands(
                parts.operations.perform,
                journal,
                partial(workload_messages, parts.workloads, worker_id),
                inventory.versions.driver_version,
                nursery,
                lambda update: frames.send(ConnectRequest(command_update=update)),
            )
            reporter = Reporter(
                identity,
                commands,
                journal,
                inventory=parts.inventory,
                driver=parts.driver,
                pool=parts.pool,
                resources=parts.resources,
                workloads=parts.workloads,
                limits=parts.limits,
                criu=parts.criu,
                applications=parts.applications,
            )
            operations = parts.operations
            plan_queries = PlanQueries(
                operations.preflight, parts.durations, operations.check_run, operations.check_adoption
            )
            queries = Queries(parts.workloads, plan_queries, parts.disk, worker_id)
            clock = ClockOffset()
            coordinator_session = CoordinatorSession(
                config.coordinator,
                config.credentials_path,
                parts.secrets,
                frames,
                state_directory,
                reporter,
                commands,
                pool,
                queries,
                journal,
                clock,
            )
            claim_waiting = ClaimWaiting(
                parts.pool, parts.resources, parts.workloads, parts.foreign, config.user_priority_limit
            )
            claims = LocalClaims(
                parts.workloads,
                parts.exit_monitor.add,
                parts.programs,
                parts.host_shares,
                nursery,
                commands,
                journal,
                claim_waiting,
            )
            answers = LocalQueries(
                parts.pool,
                parts.resources,
                parts.workloads,
                commands,
                claim_waiting,
                identity.worker_id,
                clock,
            )
            preemption = Preemption(
                pool, parts.workloads, commands, claims.ask_to_yield, claims.withdraw_yield
            )
            hook_retries = HookRetries(parts.workloads.all, commands.carry_out)
            recovery = Recovery(parts, journal, commands)
            renewal = Renewal(state_directory, config.coordinator)
            gauges = WorkerGauges(identity, parts, commands, journal, coordinator_session, renewal, clock)
            tls_files = config.metrics_tls_files
            metrics_tls = await trio.to_thread.run_sync(MetricsTls, tls_files) if tls_files else None
            await trio.to_thread.run_sync(parts.disk.sweep)
            recovery.rebuild()
            strays = Strays(parts, workloads_path, config.socket_path)
            await strays.take_back({entry.command.workload_id for entry in commands.open_entries})
            await trio.to_thread.run_sync(parts.disk.expect_interrupted)
            count = len(pool.slots.gpus)
            gpus = "1 GPU" if count == 1 else f"{count} GPUs"
            logger.info("worker %s (%s) with %s", identity.name, identity.worker_id, gpus)
            nursery.start_soon(manager.show_life)
            nursery.start_soon(recovery.settle)
            nursery.start_soon(commands.stalls.run)
            nursery.start_soon(coordinator_session.run)
            nursery.start_soon(renewal.run)
            nursery.start_soon(_wait_for_driver, parts)
            nursery.start_soon(parts.health.run)
            nursery.start_soon(parts.foreign.run, parts.workloads)
            nursery.start_soon(parts.readiness.run)
            nursery.start_soon(preemption.run)
            hook_retries_scope = trio.CancelScope()
            nursery.start_soon(_run_within, hook_retries_scope, hook_retries.run)
            nursery.start_soon(parts.disk.run)
            nursery.start_soon(bound_outputs, parts.workloads.outputs, config.output_limit_bytes)
            with _stop_signals() as signals:
                async with (
                    serve_health(config.health_listen, lambda: coordinator_session.is_connected),
                    serve_metrics(config.metrics_address, metrics_tls, gauges.read),
                    serve_locally(local_socket, claims, answers, parts.applications),
                ):
                    claims.expect_resumption()
                    manager.tell("READY=1")
                    await _wait_for_stop_signal(signals)
                    manager.tell("STOPPING=1")
                    nursery.start_soon(_stop_at_once_on_signal, signals, nursery.cancel_scope)
                    claims.suspend_streams()
                    # Applications that save themselves are reached by the local API.
                    hook_retries_scope.cancel()  # a retry would make its workload busy
                    await _finish_commands(commands)
                    await _end_workloads(parts, commands, config.stop_workloads)
                with trio.move_on_after(SETTLE_TIMEOUT_S):
                    await journal.wait_settled()
                await coordinator_session.leave(session_pb2.GOODBYE_REASON_SHUTDOWN)


def _stop_signals() -> AbstractContextManager[AsyncIterator[int]]:
    """Receives the signals that stop the worker, also while it stops: otherwise the second would kill it."""
    stopping = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        stopping.append(signal.SIGHUP)
    return trio.open_signal_receiver(*stopping)


async def _wait_for_stop_signal(signals: AsyncIterator[int]) -> None:
    logger.info("%s: stopping", signal.Signals(await anext(signals)).name)


async def _stop_at_once_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for number in signals:
        if number != signal.SIGHUP:  # a closed terminal sends it twice: by its shell, and by the kernel
            logger.error("second signal: stopping immediately; the next start recovers unfinished commands")
            scope.cancel()


async def _run_within(scope: trio.CancelScope, run: Callable[[], Awaitable[None]]) -> None:
    with scope:
        await run()


async def _wait_for_driver(parts: Parts) -> None:
    """Waits for a driver that was not usable at the start, and reports its capabilities."""
    if parts.driver.unavailable_reason is not None:
        await wait_for_driver(parts.driver)
        # A load is due now. Hello precedes the load, since capabilities have changed.
        parts.pool.slots.note_change()


async def _finish_commands(commands: Commands) -> None:
    commands.close()
    with trio.move_on_after(FINISH_TIMEOUT_S):
        await commands.wait_finished()


async def _end_workloads(parts: Parts, commands: Commands, how: StopWorkloads) -> None:
    """Leaves, suspends or stops the workloads at the end of the worker, by commands of its own.

    Nobody gets the GPUs that this frees: a claim or a yielded workload would run on after the worker.
    """
    if how == "leave":
        return
    # Not before: the commands that were under way may have needed GPUs.
    parts.pool.slots.stop_granting()

    async def end(workload: Workload) -> None:
        if how == "stop":
            operation = Operation(stop=operation_pb2.StopOperation())
        else:
            operation = Operation(suspend=operation_pb2.SuspendOperation())
        outcome = await commands.carry_out(workload.workload_id, operation)
        if outcome.HasField("error"):
            logger.error("%s", outcome.error.message)

    async with trio.open_nursery() as nursery:
        for workload in parts.workloads.all():
            if how == "park":
                wanted = workload.state == RUNNING and workload.lease is not None
            else:
                wanted = workload.origin not in LET_GO  # adopted and claiming processes are left alone
            if wanted and workload.state not in ENDED:
                nursery.start_soon(end, workload)
