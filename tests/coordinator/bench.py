"""A fleet of one worker on a real store, without a server, and a disk that can be slow or full."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectResponse
from leasehold_coordinator.access.secret_vault import SecretVault
from leasehold_coordinator.api.session_service import SessionService
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.caller_bounds import CallerBounds, CallerLimits
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.storage.rows import Change
from leasehold_coordinator.storage.store import Store

from tests.channels import authentication, open_aio_worker_channel, server_credentials

from .scripted_worker import make_hello

CONNECT = "/leasehold.worker.v1.SessionService/Connect"

FULL = FleetError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "the disk is full")

VAULT = SecretVault(bytes(32), bytes(32))


class Gate:
    """Holds up something that a test replaced, from the first time that it is reached until it opens."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        """Waits until the gate is open."""
        self.reached.set()
        await self.opened.wait()


class Bench:
    """A fleet of one worker on a real store, without a server."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        self.dispatcher = Dispatcher(self.fleet)
        self.bounds = CallerBounds(CallerLimits())
        self.service = SessionService(self.fleet, self.dispatcher, authentication(store))
        self.session = Session(make_hello())
        self.session.welcomed = True
        self.fleet.sessions["worker-alpha"] = self.session

    async def send(
        self, command_id: str = "c-1", *, workload_id: str = "w-1", timeout_s: float = 60
    ) -> Command:
        command = Command(
            command_id=command_id,
            worker_id="worker-alpha",
            workload_id=workload_id,
            operation=Operation(suspend=SuspendOperation()),
        )
        command.timeout.FromNanoseconds(round(timeout_s * 1e9))
        await self.dispatcher.create(command)
        return self.fleet.ledger.commands[command_id].command

    def sent(self, session: Session | None = None) -> list[ConnectResponse]:
        """The frames that wait for the worker, on this session or the first."""
        waiting = (session or self.session).frames
        frames = waiting.copy()
        waiting.clear()
        return frames

    async def stored(self, command_id: str = "c-1") -> Command:
        """A command as it is on disk."""
        found = await self.store.find_command(command_id)
        assert found is not None
        return found

    def update(self, state: CommandState.ValueType, *workloads: Workload) -> Coroutine[Any, Any, None]:
        update = CommandUpdate(command_id="c-1", state=state, workloads=workloads)
        return self.dispatcher.update(self.session, update)

    def fail_writes(self, monkeypatch: pytest.MonkeyPatch, times: int | None = None) -> None:
        """All writes fail from now on, or so many."""
        write_now, left = self.store.write, itertools.count() if times is None else iter(range(times))

        async def write(*rows: Change) -> None:
            if next(left, None) is not None:
                raise FULL
            await write_now(*rows)

        monkeypatch.setattr(self.store, "write", write)

    def hold_writes(
        self, monkeypatch: pytest.MonkeyPatch, table: sa.Table, error: FleetError | None = None
    ) -> Gate:
        """Writes to a table wait for a gate, and then fail if an error is given."""
        gate, write_now = Gate(), self.store.write

        async def write(*rows: Change) -> None:
            if any(row.table is table for row in rows):
                await gate()
                if error is not None:
                    raise error
            await write_now(*rows)

        monkeypatch.setattr(self.store, "write", write)
        return gate

    def hold_reads(self, monkeypatch: pytest.MonkeyPatch) -> Gate:
        """Whoever looks for a workload waits for a gate."""
        gate, find_now = Gate(), self.store.find_workloads

        async def find(
            workload_ids: Sequence[str], keep: Callable[[Workload], Workload] = lambda record: record
        ) -> list[Workload]:
            await gate()
            return await find_now(workload_ids, keep)

        monkeypatch.setattr(self.store, "find_workloads", find)
        return gate


def on_bench(path: Path, scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        store = Store.open(str(path / "store.sqlite3"))
        try:
            await scenario(Bench(store))
        finally:
            store.close()

    asyncio.run(run())


def workload(state: workload_pb2.WorkloadState.ValueType, generation: int) -> Workload:
    status = WorkloadStatus(state=state, generation=generation)
    return Workload(workload_id="w-1", name="one", worker_id="worker-alpha", status=status)


@asynccontextmanager
async def session_streams(
    bench: Bench,
) -> AsyncIterator[grpc.aio.StreamStreamMultiCallable[bytes, bytes]]:
    """Serves the sessions of this bench, and opens streams to it."""
    server = grpc.aio.server()
    bench.service.add_to(server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials())
    await server.start()
    async with open_aio_worker_channel(f"127.0.0.1:{port}") as channel:
        yield channel.stream_stream(CONNECT)
    await server.stop(None)
