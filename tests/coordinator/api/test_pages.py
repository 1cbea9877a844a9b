"""Pages of lists while entries come, change and go; filters and orders on a real store."""

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leasehold.v1 import command_pb2, event_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import ListEventsRequest
from leasehold.v1.fleet_service_pb2 import ListGpusRequest, ListWorkersRequest
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest
from leasehold_coordinator.api.command_service import CommandService
from leasehold_coordinator.api.event_service import EventService
from leasehold_coordinator.api.fleet_service import FleetService
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.workload_service import WorkloadService
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.plans import Plans
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.worker_registry import WORKER_LIMIT
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.lists import list_orders
from leasehold_coordinator.lists.pages import PageRequest, page_request
from leasehold_coordinator.storage import schema, stored_lists
from leasehold_coordinator.storage.rows import Gone, command_row, event_row, workload_row
from leasehold_coordinator.storage.schema import event_id_at

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.scripted_worker import make_hello
from tests.examples import PATIENT

NO_CONTEXT = cast("Context", None)
MESSAGE_LIMIT_BYTES = 4 * 2**20
"""What clients of gRPC take unless they are told otherwise."""

PAGES_LIMIT = 100
"""More pages than any list of these tests has."""

EXITED, RUNNING = workload_pb2.WORKLOAD_STATE_EXITED, workload_pb2.WORKLOAD_STATE_RUNNING
SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED

ListPage: TypeAlias = Callable[[int, str], Awaitable[tuple[list[str], str]]]
"""The ids and the next token of a page, given its size and token."""


def a_workload(number: int, team: str = "red", padding: int = 0) -> Workload:
    made = Workload(workload_id=f"w-{number:03}", name=f"n{number % 3}", worker_id="worker-alpha")
    made.status.state = EXITED if number % 2 else RUNNING
    made.labels["team"] = team
    made.spec.environment["X"] = "x" * padding
    made.create_time.FromSeconds(number % 5)
    return made


def a_command(number: int, padding: int = 0) -> Command:
    made = Command(command_id=f"c-{number:03}", workload_id="w-1", worker_id="worker-alpha", state=SUCCEEDED)
    made.operation.run.spec.arguments.append("x" * padding)
    made.create_time.FromSeconds(number % 5)
    return made


def an_event(number: int) -> Event:
    made = Event(event_id=f"{event_id_at(number * 10**9)}-0000", kind=event_pb2.EVENT_KIND_CORDON)
    made.time.FromSeconds(number)
    return made


class Services:
    """The services over a bench."""

    def __init__(self, bench: Bench) -> None:
        requests = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds)
        records = RecordChanges(bench.fleet, requests.decisions)
        reader = bench.fleet.reader
        self.fleet = FleetService(reader, requests, records)
        self.workloads = WorkloadService(reader, requests, records, Plans(reader, bench.dispatcher))
        self.commands = CommandService(reader, bench.dispatcher)
        self.events = EventService(reader, bench.fleet.events, bench.fleet.lease_history)

    def list_workloads(self, **fields: Any) -> ListPage:
        async def page(size: int, token: str) -> tuple[list[str], str]:
            request = ListWorkloadsRequest(page_size=size, page_token=token, **fields)
            found = await self.workloads.ListWorkloads(request, NO_CONTEXT)
            return [one.workload_id for one in found.workloads], found.next_page_token

        return page

    def list_commands(self, **fields: Any) -> ListPage:
        async def page(size: int, token: str) -> tuple[list[str], str]:
            request = ListCommandsRequest(page_size=size, page_token=token, **fields)
            found = await self.commands.ListCommands(request, NO_CONTEXT)
            return [one.command_id for one in found.commands], found.next_page_token

        return page

    def list_events(self, **fields: Any) -> ListPage:
        async def page(size: int, token: str) -> tuple[list[str], str]:
            request = ListEventsRequest(page_size=size, page_token=token, **fields)
            found = await self.events.ListEvents(request, NO_CONTEXT)
            return [one.event_id for one in found.events], found.next_page_token

        return page

    def list_workers(self, **fields: Any) -> ListPage:
        async def page(size: int, token: str) -> tuple[list[str], str]:
            request = ListWorkersRequest(page_size=size, page_token=token, **fields)
            found = await self.fleet.ListWorkers(request, NO_CONTEXT)
            return [one.worker_id for one in found.workers], found.next_page_token

        return page

    def list_gpus(self, **fields: Any) -> ListPage:
        async def page(size: int, token: str) -> tuple[list[str], str]:
            request = ListGpusRequest(page_size=size, page_token=token, **fields)
            found = await self.fleet.ListGpus(request, NO_CONTEXT)
            return [one.gpu.uuid for one in found.gpus], found.next_page_token

        return page


async def whole(page: ListPage, size: int = 1000) -> list[str]:
    found, token = await page(size, "")
    while token:
        more, token = await page(size, token)
        found += more
    return found


async def add(bench: Bench, kind: str, number: int) -> list[str]:
    """Adds an entry, and says which ids that adds to the list."""
    if kind == "workloads":
        await bench.store.write(workload_row(a_workload(number)))
        return [f"w-{number:03}"]
    if kind == "commands":
        await bench.store.write(command_row(StoredCommand(a_command(number))))
        return [f"c-{number:03}"]
    if kind == "events":
        event = an_event(number)
        await bench.store.write(event_row(event))
        return [event.event_id]
    hello = make_hello(f"h{number:03}", gpu_count=2, labels={"team": "red"})
    bench.fleet.registry.add_stored(hello, 1)
    known = bench.fleet.registry.find(hello.worker_id)
    known.reported = True
    return [hello.worker_id] if kind == "workers" else [gpu.uuid for gpu in hello.gpus]


async def remove(bench: Bench, kind: str, number: int) -> list[str]:
    """Removes an entry as retention and operators do, and says which ids that takes out of the list."""
    if kind in ("workers", "gpus"):
        known = bench.fleet.registry.find(f"h{number:03}")
        bench.fleet.registry.forget(known)
        return [known.hello.worker_id] if kind == "workers" else [gpu.uuid for gpu in known.hello.gpus]
    table = {"workloads": schema.workloads, "commands": schema.commands, "events": schema.events}[kind]
    gone = {
        "workloads": f"w-{number:03}",
        "commands": f"c-{number:03}",
        "events": an_event(number).event_id,
    }[kind]
    await bench.store.write(Gone(table, gone))
    return [gone]


async def change(bench: Bench, kind: str, number: int) -> None:
    """Changes an entry: not what it is sorted by, and not whether the filters match."""
    if kind == "workloads":
        changed = a_workload(number)
        changed.status.generation += 1
        changed.status.state = EXITED
        await bench.store.write(workload_row(changed))
    elif kind == "commands":
        changed_command = a_command(number)
        changed_command.revision += 1
        await bench.store.write(command_row(StoredCommand(changed_command)))
    elif kind != "events":
        bench.fleet.registry.find(f"h{number:03}").load_interval_s += 1


LISTS = [
    pytest.param("workloads", {"include_ended": True}, marks=pytest.mark.long),
    pytest.param("workloads", {"include_ended": True, "order_by": "create_time"}, marks=pytest.mark.long),
    pytest.param(
        "workloads", {"include_ended": True, "order_by": "name desc, create_time"}, marks=pytest.mark.long
    ),
    ("workloads", {"include_ended": True, "filter": "labels.team = red", "order_by": "name"}),
    pytest.param("commands", {}, marks=pytest.mark.long),
    ("commands", {"order_by": "create_time", "filter": "operation = run"}),
    ("events", {}),
    pytest.param(
        "events",
        {"order_by": "time", "filter": "kind = CORDON AND time >= 1970-01-01T00:00:00Z"},
        marks=pytest.mark.long,
    ),
    pytest.param("workers", {}, marks=pytest.mark.long),
    ("workers", {"order_by": "gpu_count, name desc", "filter": "labels.team = red"}),
    pytest.param("gpus", {}, marks=pytest.mark.long),
    ("gpus", {"order_by": "slot desc, worker", "filter": "worker:* AND gpu_name:*"}),
]

STEPS = st.lists(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "change"]), st.integers(0, 39)), max_size=6),
    max_size=12,
)


@pytest.mark.parametrize(("kind", "fields"), LISTS)
@settings(PATIENT, max_examples=6)
@given(first=st.sets(st.integers(0, 39), max_size=20), steps=STEPS, size=st.integers(1, 5))
def test_nothing_comes_twice_and_nothing_that_stays_is_skipped(
    kind: str,
    fields: dict[str, str | bool],
    first: set[int],
    steps: list[list[tuple[str, int]]],
    size: int,
) -> None:
    async def scenario(bench: Bench) -> None:
        page: ListPage = getattr(Services(bench), f"list_{kind}")(**fields)
        present = set(first)
        staying: set[str] = set()
        for number in first:
            staying.update(await add(bench, kind, number))
        listed: list[str] = []
        token = ""
        for changes in itertools.chain(steps, itertools.repeat([], PAGES_LIMIT)):
            found, token = await page(size, token)
            assert len(found) <= size
            listed += found
            if not token:
                break
            for what, number in changes:
                if what == "add" and number not in present:
                    present.add(number)
                    await add(bench, kind, number)
                elif what == "remove" and number in present:
                    present.discard(number)
                    staying.difference_update(await remove(bench, kind, number))
                elif what == "change" and number in present:
                    await change(bench, kind, number)
        assert not token, "the list has no end"
        assert len(listed) == len(set(listed)), "an entry came twice"
        assert staying <= set(listed), "an entry that was there throughout was skipped"

    with tempfile.TemporaryDirectory() as folder:
        on_bench(Path(folder), scenario)


def test_lists_of_the_store_follow_filters_and_orders(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(12):
            await bench.store.write(workload_row(a_workload(number, "red" if number % 4 else "blue")))
        services = Services(bench)

        async def ids(**fields: Any) -> list[int]:
            found = await whole(services.list_workloads(include_ended=True, **fields), 3)
            return [int(one.removeprefix("w-")) for one in found]

        assert await ids(filter="labels.team = blue") == [4, 8, 0]
        assert await ids(filter="labels.team = blue", order_by="create_time") == [0, 8, 4]
        assert await ids(filter="labels.team = blue", order_by="name") == [0, 4, 8]
        assert await ids(filter="state = RUNNING AND NOT labels.team = blue") == [2, 6, 10]
        assert sorted(await ids(filter="name = n1 OR workload = w-003")) == [1, 3, 4, 7, 10]
        assert await ids(filter="worker != worker-alpha") == []
        assert await ids(filter="create_time >= 1970-01-01T00:00:04Z") == [4, 9]
        assert await ids(filter="NOT create_time < 1970-01-01T00:00:04Z AND NOT name = n0") == [4]
        live = await whole(services.list_workloads(filter="state = EXITED"))
        assert live == [], "ended ones are listed on request only"

    on_bench(tmp_path, scenario)


def test_names_in_filters_stand_for_all_workers_and_workloads_that_have_them(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.fleet.registry.add_stored(make_hello("alpha"), 1)
        for number in (1, 4, 2):  # 1 and 4 are named n1
            await bench.store.write(workload_row(a_workload(number)))
            command = a_command(number)
            command.workload_id = f"w-{number:03}"
            event = an_event(number)
            event.workload_id, event.worker_id = command.workload_id, "worker-alpha"
            await bench.store.write(command_row(StoredCommand(command)), event_row(event))
        services = Services(bench)
        assert await whole(services.list_commands(filter="workload = n1")) == ["c-004", "c-001"]
        assert await whole(services.list_commands(filter="NOT workload = n1")) == ["c-002"]
        assert await whole(services.list_commands(filter="workload = w-001")) == ["c-001"]
        assert await whole(services.list_commands(filter="workload = n9")) == []
        events = await whole(services.list_events(filter="workload = n1 AND worker = alpha"))
        assert events == [an_event(4).event_id, an_event(1).event_id]
        found = await whole(services.list_workloads(include_ended=True, filter="worker = alpha"))
        assert len(found) == 3
        assert await whole(services.list_workers(filter="worker = alpha")) == ["worker-alpha"]

    on_bench(tmp_path, scenario)


def test_a_filter_reads_only_what_columns_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.store.write(*(workload_row(a_workload(number)) for number in range(40)))
        await bench.store.write(*(event_row(an_event(number)) for number in range(10, 50)))
        read: list[str] = []
        decode = bench.store._decoder.decode

        def note(kind: Any, table: Any, row: Any) -> Any:
            read.append(row[0])
            return decode(kind, table, row)

        monkeypatch.setattr(bench.store._decoder, "decode", note)
        services = Services(bench)

        async def reads(page: ListPage) -> int:
            read.clear()
            await whole(page)
            return len(read)

        ended = {"include_ended": True}
        assert await reads(services.list_workloads(**ended, filter="user = ann")) == 40
        assert await reads(services.list_workloads(**ended, filter="name = n1 AND user = ann")) == 13
        assert await reads(services.list_workloads(**ended, filter="state = EXITED")) == 20
        assert await reads(services.list_workloads(**ended, filter="state = RUNNING OR name = n1")) == 27
        assert await reads(services.list_workloads(**ended, filter="name = n1 OR user = ann")) == 40
        assert await reads(services.list_workloads(**ended, filter="NOT name = n1")) == 27
        assert await reads(services.list_workloads(**ended, filter="NOT state = EXITED")) == 40
        assert await reads(services.list_workloads(**ended, filter="workload = w-007")) == 1
        assert await reads(services.list_events(filter="time >= 1970-01-01T00:00:45Z")) == 6
        assert await reads(services.list_events(filter="workload = w-1")) == 0

    on_bench(tmp_path, scenario)


def test_a_page_looks_through_a_bounded_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_lists, "SCAN_LIMIT", 10)

    async def scenario(bench: Bench) -> None:
        await bench.store.write(*(command_row(StoredCommand(a_command(number))) for number in range(35)))
        page = Services(bench).list_commands(
            filter="command_id:c-03 OR request_id = x", order_by="create_time"
        )
        pages, token = [], ""
        while True:
            found, token = await page(100, token)
            pages.append(len(found))
            if not token:
                break
        assert (len(pages), sum(pages)) == (4, 5), "some pages are short, and the list goes on"

    on_bench(tmp_path, scenario)


def test_a_page_looks_through_rows_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_lists, "SCAN_LIMIT_S", -1.0)

    async def scenario(bench: Bench) -> None:
        await bench.store.write(*(command_row(StoredCommand(a_command(number))) for number in range(5)))
        page, token, found = Services(bench).list_commands(filter="command_id:c-003"), "", []
        for is_last in (False, False, False, False, True):
            ids, token = await page(100, token)
            found += ids
            assert (not token) == is_last, "each page looks at one row"
        assert found == ["c-003"]

    on_bench(tmp_path, scenario)


def test_a_made_up_token_without_a_name_is_a_place_of_the_list(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await add(bench, "gpus", 1)
        services = Services(bench)
        for request, order, page in (
            (ListWorkersRequest(), list_orders.WORKERS, services.list_workers()),
            (ListGpusRequest(), list_orders.GPUS, services.list_gpus()),
        ):
            asked: PageRequest[Any] = page_request(request, order.parse(""))
            token = asked.token((None,) * len(asked.order.keys))
            assert (await page(100, token))[0]

    on_bench(tmp_path, scenario)


def test_large_entries_come_in_pages_that_clients_accept(tmp_path: Path) -> None:
    """Eighty runs with 90 KB each once made these lists fail for everybody."""

    async def scenario(bench: Bench) -> None:
        await bench.store.write(*(workload_row(a_workload(n, padding=120_000)) for n in range(80)))
        await bench.store.write(*(command_row(StoredCommand(a_command(n, 180_000))) for n in range(80)))
        services = Services(bench)
        numbers: list[int] = []
        for ask in (
            lambda token: services.workloads.ListWorkloads(
                ListWorkloadsRequest(page_size=1000, page_token=token, include_ended=True), NO_CONTEXT
            ),
            lambda token: services.commands.ListCommands(
                ListCommandsRequest(page_size=1000, page_token=token), NO_CONTEXT
            ),
        ):
            token, count = "", 0
            while True:
                page: Any = await ask(token)
                assert page.ByteSize() < MESSAGE_LIMIT_BYTES
                count += len(page.workloads if hasattr(page, "workloads") else page.commands)
                token = page.next_page_token
                if not token:
                    break
            numbers.append(count)
        assert numbers == [80, 80]

    on_bench(tmp_path, scenario)


def test_gpus_and_ten_thousand_silent_workers_fit_into_an_answer(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        registry = bench.fleet.registry
        for number in range(WORKER_LIMIT - 100):
            hello = make_hello(f"silent-{number}", gpu_count=0)
            hello.worker_id = f"{number:05}-" + "w" * 122
            registry.add_stored(hello, 1)
        for number in range(100):
            hello = make_hello(f"h{number}", gpu_count=10)
            for gpu in hello.gpus:
                gpu.name = "x" * 3_000
            registry.add_stored(hello, 1)
            registry.find(hello.worker_id).reported = True
        service, count, token = Services(bench).fleet, 0, ""
        while True:
            request = ListGpusRequest(page_size=1000, page_token=token)
            page = await service.ListGpus(request, NO_CONTEXT)
            assert page.ByteSize() < MESSAGE_LIMIT_BYTES
            assert len(page.unreachable) == WORKER_LIMIT - 100
            count += len(page.gpus)
            if not (token := page.next_page_token):
                break
        assert count == 1_000

    on_bench(tmp_path, scenario)


def test_a_long_list_in_memory_leaves_the_loop_to_others(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(300):
            await add(bench, "gpus", number)
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        before = turns
        services = Services(bench)
        assert len(await whole(services.list_gpus(filter="slot = 1", order_by="gpu_name"))) == 300
        assert turns > before + 1
        ticking.cancel()

    on_bench(tmp_path, scenario)


def test_a_bad_filter_is_refused_by_each_list(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        services = Services(bench)
        for kind in ("workloads", "commands", "events", "workers", "gpus"):
            with pytest.raises(FleetError, match="no field is named 'nothing'"):
                await getattr(services, f"list_{kind}")(filter="nothing = x")(1, "")
            with pytest.raises(FleetError, match="invalid order 'nothing'"):
                await getattr(services, f"list_{kind}")(order_by="nothing")(1, "")

    on_bench(tmp_path, scenario)
