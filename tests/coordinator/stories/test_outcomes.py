"""What clients are told of a command is on disk, and its outcome reaches whoever watches."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import WatchCommandRequest, WatchCommandsResponse
from leasehold_coordinator.api.command_service import CommandService
from leasehold_coordinator.storage import schema

from tests.coordinator.bench import FULL, Bench, on_bench

DISPATCHED, ACCEPTED, SUCCEEDED = (
    command_pb2.COMMAND_STATE_DISPATCHED,
    command_pb2.COMMAND_STATE_ACCEPTED,
    command_pb2.COMMAND_STATE_SUCCEEDED,
)


async def watch(bench: Bench, told: "asyncio.Queue[Command]") -> None:
    context: Any = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1")  # more of it is for refusals
    request = WatchCommandRequest(command_id="c-1")
    async for response in CommandService(bench.fleet.reader, bench.dispatcher).WatchCommand(request, context):
        told.put_nowait(response.command)


def test_a_step_that_is_under_way_is_not_told_and_its_revision_hides_no_outcome(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        told: asyncio.Queue[Command] = asyncio.Queue()
        with pytest.MonkeyPatch.context() as monkeypatch:
            commands = bench.hold_writes(monkeypatch, schema.commands, FULL)
            await bench.update(ACCEPTED)
            await commands.reached.wait()
            watching = asyncio.create_task(watch(bench, told))
            first = await told.get()
            assert (first.state, first.revision) == (DISPATCHED, 1)
            commands.opened.set()
        await bench.update(SUCCEEDED)
        async with asyncio.timeout(10):
            await watching
        assert told.get_nowait() == await bench.stored()

    on_bench(tmp_path, scenario)


def test_an_outcome_passes_whatever_its_revision(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        sent = await bench.send()
        told: asyncio.Queue[Command] = asyncio.Queue()
        watching = asyncio.create_task(watch(bench, told))
        assert await told.get() == sent
        ended = Command(command_id="c-1", state=SUCCEEDED, revision=sent.revision)
        bench.fleet.reader.command_hub.publish("c-1", WatchCommandsResponse(command=ended))
        async with asyncio.timeout(10):
            await watching
        assert told.get_nowait() == ended

    on_bench(tmp_path, scenario)


def test_a_command_that_is_being_stored_is_not_known_yet(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            commands = bench.hold_writes(monkeypatch, schema.commands)
            creating = asyncio.create_task(bench.send())
            await commands.reached.wait()
            assert await bench.fleet.reader.find_command("c-1") is None
            commands.opened.set()
            created = await creating
        assert await bench.fleet.reader.find_command("c-1") == created

    on_bench(tmp_path, scenario)
