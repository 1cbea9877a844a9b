"""Parts of the server without a server: what waits for a browser, sessions, and messages as JSON."""

import asyncio
import errno
import json
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from leasehold.v1 import command_pb2, lease_pb2
from leasehold.v1.access_service_pb2 import WhoAmIRequest, WhoAmIResponse
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest, ListCommandsResponse, WatchCommandsResponse
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.fleet_service_pb2 import (
    CordonRequest,
    CordonResponse,
    ListWorkersRequest,
    ListWorkersResponse,
)
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.watch_pb2 import Bookmark
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_RUNNING, Workload, WorkloadState, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    ListWorkloadsRequest,
    ListWorkloadsResponse,
    SuspendWorkerRequest,
)
from leasehold_client.display.terminal_text import _DIRECTIONS
from leasehold_coordinator.lists.filter_expression import parse_filter, restrictions
from leasehold_web import actions, feed, listeners, sessions, tables
from leasehold_web.documents import document, gpu_row
from leasehold_web.entries import Api, Entry, LoginRefusedError
from leasehold_web.feed import Feed, Feeds
from leasehold_web.listeners import Listener
from leasehold_web.sessions import Sessions
from leasehold_web.workload_names import workload_names


class Doors:
    """Logins of a test."""

    hint = ""

    def __init__(self) -> None:
        self.left = 0
        self.refuses = False

    def entry(self, caller: str = "user/ann") -> Entry:
        async def api() -> Api:
            raise NotImplementedError

        async def leave() -> None:
            self.left += 1

        return Entry(caller, api, object(), caller.encode(), leave)

    async def by_token(self, token: str, address: str) -> Entry:
        return self.entry()

    async def by_certificate(self, der: bytes, address: str) -> Entry:
        return self.entry()

    async def again(self, kept: bytes) -> Entry:
        if self.refuses:
            raise LoginRefusedError("the certificate was revoked")
        return self.entry(kept.decode())


def refused(reason: str) -> grpc.aio.AioRpcError:
    """An error of the API."""
    info = AnyMessage()
    info.Pack(ErrorInfo(reason=reason))
    details = Status(details=[info]).SerializeToString()
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), metadata)


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def test_a_slow_browser_gets_the_newest_state_of_each_entry_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(listeners, "BATCH_LIMIT", 2)

    async def story() -> list[Any]:
        listener = Listener()
        for number in range(1_000):
            listener.put("gpu", f"GPU-{number % 3}", {"number": number})
        listener.put("gpu", "GPU-0", None)
        found: list[Any] = []
        async for message in listener.messages():
            found.append(json.loads(message))
            if len(found) == 3:
                listener.close()
        return found

    reset, first, second = asyncio.run(story())
    assert reset == {"reset": {}}
    assert first["changes"] == [["gpu", "GPU-1", {"number": 997}], ["gpu", "GPU-2", {"number": 998}]]
    assert second["changes"] == [["gpu", "GPU-0", None]]


def test_the_number_of_sessions_has_a_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr(sessions, "SESSION_LIMIT", 2)

    async def story() -> None:
        doors = Doors()
        live = Sessions(doors)
        first, second = await live.open(doors.entry()), await live.open(doors.entry())
        assert await live.find(first) is not None  # used last
        third = await live.open(doors.entry())
        assert doors.left == 1
        assert [await live.find(one) is not None for one in (first, second, third)] == [True, False, True]
        assert await live.find("x" * 10_000) is None

    asyncio.run(story())


def test_logins_of_one_caller_end_no_session_of_another(monkeypatch: Any) -> None:
    monkeypatch.setattr(sessions, "SESSION_LIMIT", 4)
    monkeypatch.setattr(sessions, "SESSIONS_PER_CALLER", 2)

    async def story() -> None:
        doors = Doors()
        live = Sessions(doors)
        of_ann = await live.open(doors.entry("user/ann"))
        of_mallory = [await live.open(doors.entry("user/mallory")) for _ in range(10)]
        assert await live.find(of_ann) is not None
        assert [await live.find(one) is not None for one in of_mallory] == [False] * 8 + [True] * 2

    asyncio.run(story())


def test_a_session_ends_with_its_time_and_with_its_credential(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "sessions"

    async def story() -> None:
        doors = Doors()
        live = Sessions(doors, path, write)
        session_id = await live.open(doors.entry())
        assert session_id not in path.read_text()  # a digest only
        again = Sessions(doors, path, write)
        await again.load()
        assert await again.find(session_id) is not None
        doors.refuses = True
        later = Sessions(doors, path, write)
        await later.load()
        assert await later.find(session_id) is None
        doors.refuses = False
        now_s = time.time()
        monkeypatch.setattr(time, "time", lambda: now_s + sessions.SESSION_LIFE_S + 1)
        assert await again.find(session_id) is None
        too_late = Sessions(doors, path, write)
        await too_late.load()
        assert await too_late.find(session_id) is None
        path.write_bytes(b"damaged")
        await too_late.load()

    asyncio.run(story())


def test_a_logout_whose_browser_leaves_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "sessions"

    async def story() -> None:
        doors = Doors()
        leaving, go_on = asyncio.Event(), asyncio.Event()

        async def leave() -> None:
            leaving.set()
            await go_on.wait()

        live = Sessions(doors, path, write)
        session_id = await live.open(replace(doors.entry(), leave=leave))
        session = await live.find(session_id)
        assert session is not None
        logout = asyncio.create_task(live.close(session))
        await leaving.wait()
        logout.cancel()
        await asyncio.gather(logout, return_exceptions=True)
        go_on.set()
        await live.stop()
        later = Sessions(doors, path, write)
        await later.load()
        assert await later.find(session_id) is None

    asyncio.run(story())


def test_a_logout_on_a_full_disk_survives_a_restart(tmp_path: Path) -> None:
    path, full = tmp_path / "sessions", False

    def write_if_free(file: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    async def story() -> None:
        nonlocal full
        doors = Doors()
        live = Sessions(doors, path, write_if_free)
        session_id = await live.open(doors.entry())
        session = await live.find(session_id)
        assert session is not None
        full = True
        await live.close(session)
        later = Sessions(doors, path, write_if_free)
        await later.load()
        assert await later.find(session_id) is None

    asyncio.run(story())


def test_a_file_of_sessions_that_can_be_neither_written_nor_deleted_is_told(
    tmp_path: Path, caplog: Any
) -> None:
    def refuse(file: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    async def story() -> None:
        doors = Doors()
        (tmp_path / "folder").mkdir()  # which unlink refuses
        await Sessions(doors, tmp_path / "folder", refuse).open(doors.entry())
        await Sessions(doors, tmp_path / "none", refuse).open(doors.entry())

    asyncio.run(story())
    kept, gone = (record.getMessage() for record in caplog.records)
    assert kept == (
        f"{tmp_path / 'folder'} can be neither written (Read-only file system) nor deleted (Is a directory), "
        "so sessions that end now are valid again after a restart: delete the file"
    )
    assert gone == (
        f"{tmp_path / 'none'} can't be written (Read-only file system), "
        "so browsers must log in again after a restart"
    )


def test_sessions_of_an_earlier_run_count(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sessions, "SESSIONS_PER_CALLER", 2)

    async def story(limit: int, expected: list[bool]) -> None:
        monkeypatch.setattr(sessions, "SESSION_LIMIT", limit)
        doors, path = Doors(), tmp_path / f"sessions-{limit}"
        opened: list[str] = []
        for _ in range(3):  # each a run
            live = Sessions(doors, path, write)
            await live.load()
            opened += [await live.open(doors.entry("user/ann")), await live.open(doors.entry("user/bob"))]
        assert [await live.find(one) is not None for one in opened] == expected
        assert len(live._live) == sum(expected)

    asyncio.run(story(3, [False, False, True, False, True, True]))  # bob's login ends bob's session
    asyncio.run(story(6, [False, False, True, True, True, True]))  # two of each caller


def test_logins_of_one_caller_end_no_earlier_session_of_another(tmp_path: Path) -> None:
    path = tmp_path / "sessions"

    async def story() -> None:
        doors = Doors()
        live = Sessions(doors, path, write)
        of_others = [await live.open(doors.entry(f"user/{number % 8}")) for number in range(250)]
        later = Sessions(doors, path, write)
        await later.load()
        of_mallory = [await later.open(doors.entry("user/mallory")) for _ in range(200)]
        assert [await later.find(one) is not None for one in of_mallory] == [False] * 194 + [True] * 6
        assert [one for one in of_others if await later.find(one) is None] == []

    asyncio.run(story())


def test_a_kept_session_may_lack_its_caller(tmp_path: Path) -> None:
    path = tmp_path / "sessions"

    async def story() -> None:
        doors = Doors()
        session_id = await Sessions(doors, path, write).open(doors.entry())
        (kept,) = json.loads(path.read_text())
        assert kept.pop("caller") == "user/ann"
        path.write_text(json.dumps([kept]))
        later = Sessions(doors, path, write)
        await later.load()
        session = await later.find(session_id)
        assert session is not None
        assert session.entry.caller == "user/ann"

    asyncio.run(story())


def test_unknown_is_absent_and_never_zero() -> None:
    gpu = FleetGpu(
        worker_id="worker-a",
        gpu=Gpu(uuid="GPU-1", slot=1),
        lease=GpuLease(gpu_uuid="GPU-1", state=lease_pb2.SLOT_STATE_FREE),
    )
    row = gpu_row(gpu)
    assert row == {"uuid": "GPU-1", "worker_id": "worker-a", "slot": 1, "name": "", "state": "FREE"}
    gpu.lease.sample.memory_used_bytes = 0
    assert gpu_row(gpu)["sample"] == {"memory_used_bytes": 0}


def test_a_message_is_json_with_the_names_of_the_protos() -> None:
    workload = Workload(
        workload_id="w-1",
        status=WorkloadStatus(state=WORKLOAD_STATE_RUNNING, parked_bytes=0),
        labels={"team": "a"},
    )
    workload.create_time.FromMilliseconds(1_500)
    workload.spec.helper.grace.FromMilliseconds(250)
    workload.status.lease.gpu_uuids.append("GPU-1")
    assert document(workload) == {
        "workload_id": "w-1",
        "status": {"state": "RUNNING", "lease": {"gpu_uuids": ["GPU-1"]}, "parked_bytes": 0},
        "create_time": 1_500.0,
        "spec": {"helper": {"grace": 0.25}},
        "labels": {"team": "a"},
    }
    workload.status.state = 99  # type: ignore[assignment]  # of a newer coordinator
    assert document(workload.status)["state"] == "UNKNOWN_99"


def test_a_view_that_was_reduced_shows_nothing_of_before_to_a_new_window(monkeypatch: Any) -> None:
    """An operator became a user: no snapshot has ended commands, so none would replace those of others."""

    async def story() -> None:
        opened = 0
        is_reduced = asyncio.Event()

        async def watch(api: Api, token: str) -> Any:
            nonlocal opened
            opened += 1
            if opened == 1:
                failed = Command(command_id="c-1", state=command_pb2.COMMAND_STATE_FAILED, actor="user/bob")
                yield WatchCommandsResponse(resume_token="t", command=failed)
                raise refused("INVALID_TOKEN")
            is_reduced.set()
            await asyncio.Event().wait()

        async def api() -> Any:
            return None

        async def leave() -> None:
            pass

        monkeypatch.setattr(feed, "_WATCHES", {"commands": (("command",), watch)})
        entry = Entry("user/ann", api, object(), b"", leave)
        view = Feed(entry)
        with view.listening(entry):
            await is_reduced.wait()
            with view.listening(entry) as later:
                assert [key for key in later._pending if key[0] == "command"] == []
        await view.stop()

    asyncio.run(story())


def test_a_snapshot_after_lost_changes_is_told(monkeypatch: Any) -> None:
    """A browser that stays connected to this server would not ask for what began and ended meanwhile."""

    async def story() -> None:
        opened = 0
        has_first = asyncio.Event()

        async def watch(api: Api, token: str) -> Any:
            nonlocal opened
            opened += 1
            if token:
                raise refused("INVALID_TOKEN")
            yield WatchCommandsResponse(resume_token="t", bookmark=Bookmark(snapshot_end=True))
            if opened == 1:
                await has_first.wait()
            else:
                await asyncio.Event().wait()

        async def api() -> Any:
            return None

        async def leave() -> None:
            pass

        monkeypatch.setattr(feed, "_WATCHES", {"commands": (("command",), watch)})
        entry = Entry("user/ann", api, object(), b"", leave)
        view = Feed(entry)
        with view.listening(entry) as listener:
            async for message in listener.messages():
                told = json.loads(message)
                if told.get("state") == {"is_loading": False}:
                    if has_first.is_set():
                        break
                    assert "gap" not in told
                    has_first.set()
        assert told["gap"] == {}
        assert opened == 3
        await view.stop()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_the_end_of_one_login_ends_no_view_of_another(monkeypatch: Any) -> None:
    async def story() -> None:
        used: list[Any] = []
        begun, ended = asyncio.Event(), asyncio.Event()

        async def watch(api: Any, token: str) -> Any:
            used.append((api, token))
            begun.set()
            if api == "first":
                yield WatchCommandsResponse(resume_token="t", bookmark=Bookmark(snapshot_end=True))
                await ended.wait()
                raise grpc.aio.UsageError("Channel is closed.")
            yield WatchCommandsResponse(command=Command(command_id="c-1"))
            await asyncio.Event().wait()

        def login(name: Any) -> Entry:
            async def api() -> Any:
                return name

            async def leave() -> None:
                pass

            return Entry("user/ann", api, "ann", b"", leave)

        monkeypatch.setattr(feed, "_WATCHES", {"commands": (("command",), watch)})
        feeds = Feeds()
        first, second = login("first"), login("second")
        view = feeds.of(first)
        with ExitStack() as windows:
            with view.listening(first):
                assert feeds.of(second) is view
                listener = windows.enter_context(view.listening(second))
                await begun.wait()
            ended.set()
            async for message in listener.messages():
                if ["command", "c-1"] in [one[:2] for one in json.loads(message).get("changes", [])]:
                    break
        assert used == [("first", ""), ("second", "t")]
        await feeds.stop()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_refused_view_says_why_and_ends_its_streams(monkeypatch: Any) -> None:
    async def story() -> None:
        async def watch(api: Api, token: str) -> Any:
            if not token:
                raise refused("NOT_PERMITTED")
            yield

        async def api() -> Any:
            return None

        async def leave() -> None:
            pass

        monkeypatch.setattr(feed, "_WATCHES", {"commands": (("command",), watch)})
        entry = Entry("user/ann", api, object(), b"", leave)
        view = Feed(entry)
        with view.listening(entry) as listener:
            listener.put("gpu", "GPU-1", {})
            found = [json.loads(message) async for message in listener.messages()]  # ends by itself
        assert found[-1]["state"]["refused"]["reason"] == "NOT_PERMITTED"
        listener.put("gpu", "GPU-2", {})
        assert listener._pending == {}
        await view.stop()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_view_whose_certificate_was_renewed_goes_on_with_the_newer_one(monkeypatch: Any) -> None:
    async def story() -> None:
        old, new = SimpleNamespace(access=object()), SimpleNamespace(access=object())
        given = iter([old, new, new, new])
        opened = []

        async def watch(api: Any, token: str) -> Any:
            opened.append((api, token))
            if len(opened) in (1, 3):  # at the expiry of each certificate
                yield WatchCommandsResponse(bookmark=Bookmark(snapshot_end=True), resume_token="1")
                raise refused("UNAUTHENTICATED")
            yield WatchCommandsResponse(bookmark=Bookmark(), resume_token="2")

        async def api() -> Any:
            return next(given, new)

        async def leave() -> None:
            pass

        monkeypatch.setattr(feed, "_WATCHES", {"commands": (("command",), watch)})
        entry = Entry("user/ann", api, object(), b"", leave)
        view = Feed(entry)
        with view.listening(entry) as listener:
            found = [json.loads(message) async for message in listener.messages()]  # ends by itself
        assert opened == [(old, ""), (new, "1"), (new, "2")]
        assert found[-1]["state"]["refused"]["reason"] == "UNAUTHENTICATED"
        await view.stop()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_watch_that_fails_ends_its_streams_and_begins_again(monkeypatch: Any, caplog: Any) -> None:
    """A stream that goes on would show a page that looks live."""

    async def story() -> None:
        opened = 0

        async def watch(api: Api, token: str) -> Any:
            nonlocal opened
            opened += 1
            yield 1 // 0

        async def api() -> Any:
            return None

        async def leave() -> None:
            pass

        monkeypatch.setattr(feed, "_WATCHES", {"commands": (("command",), watch)})
        entry = Entry("user/ann", api, object(), b"", leave)
        view = Feed(entry)
        for times in (1, 2):
            with view.listening(entry) as listener:
                async for _ in listener.messages():
                    pass  # ends by itself
            assert opened == times
        await view.stop()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert "the watches of a page have failed" in caplog.text


def test_the_filters_of_a_table_fit_the_bounds_of_filters() -> None:
    asked: list[str] = []

    class Workloads:
        async def ListWorkloads(self, request: ListWorkloadsRequest, **call: Any) -> ListWorkloadsResponse:
            expression = parse_filter(request.filter)
            assert expression is not None
            found = [restriction.value for restriction in restrictions(expression)]
            asked.extend(found)
            return ListWorkloadsResponse(workloads=[Workload(workload_id=one, name="n") for one in found])

    ids = [f"{number:0128}" for number in range(tables.PAGE_SIZE)]
    workloads: Any = Workloads()
    api = Api(*[workloads] * len(Api._fields))
    assert asyncio.run(workload_names(api, ids)) == dict.fromkeys(ids, "n")
    assert asked == ids


def test_tables_escape_marks_of_direction() -> None:
    assert tables._text("fan\u202egpj <b>") == r"fan\u202egpj &lt;b&gt;"
    for mark in _DIRECTIONS:
        assert tables._text(mark) == ascii(mark)[1:-1]


def test_a_dialog_waits_longer_than_the_calls_of_a_drain() -> None:
    script = resources.files("leasehold_web").joinpath("static/confirmation.js").read_text()
    found = re.search(r"const ANSWER_MS = (\d+);", script)
    assert found
    assert int(found[1]) > 3 * 1000 * actions.CALL_TIMEOUT_S


def test_a_drain_whose_suspends_are_refused_tells_its_stored_cordon() -> None:
    def drain(code: grpc.StatusCode, reason: str) -> actions.Outcome:
        class Services:
            async def WhoAmI(self, request: WhoAmIRequest, **call: Any) -> WhoAmIResponse:
                return WhoAmIResponse(identity="user/ann")

            async def Cordon(self, request: CordonRequest, **call: Any) -> CordonResponse:
                return CordonResponse(command=Command(command_id="c-1"))

            async def SuspendWorker(self, request: SuspendWorkerRequest, **call: Any) -> None:
                metadata = refused(reason).trailing_metadata() if reason else grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "alpha is silent")

        services: Any = Services()
        api = Api(*[services] * len(Api._fields))
        return asyncio.run(actions.carry_out(api, actions.Drain(worker="alpha", reason="a fan")))

    outcome = drain(grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE")
    assert [one["command_id"] for one in outcome.commands] == ["c-1"]
    assert outcome.problem == "Nothing was suspended after the cordon: alpha is silent"
    unknown = "It is unknown whether workloads were suspended after the cordon: "
    assert drain(grpc.StatusCode.UNAVAILABLE, "STORAGE_UNAVAILABLE").problem == f"{unknown}alpha is silent"
    assert drain(grpc.StatusCode.DEADLINE_EXCEEDED, "").problem.startswith(unknown)


def test_a_table_says_where_a_workload_is_parked() -> None:
    def parked(state: str, **status: Any) -> str:
        return tables._parked(WorkloadStatus(state=WorkloadState.Value(f"WORKLOAD_STATE_{state}"), **status))

    gib = 2**30
    assert parked("SUSPENDED", parked_bytes=gib) == "1.0 GiB in host memory"
    assert parked("SUSPENDED") == "unknown size in host memory"
    assert parked("CHECKPOINTED", disk_bytes=2 * gib) == "2.0 GiB on disk"
    assert parked("STOPPED", park_time=Timestamp(seconds=1)) == "0 B on disk"
    assert parked("STOPPED") == "unknown size on disk"
    for strategy, told in (
        ("RETAIN", "unknown size in device memory"),
        ("OFFLOAD", "1.0 GiB in host memory"),
        ("DISCARD", "weights discarded"),
    ):
        policy = EvictionPolicy(weight_strategy=f"WEIGHT_STRATEGY_{strategy}")  # type: ignore[arg-type]
        assert parked("SLEEPING", parked_by=policy, parked_bytes=gib) == told
    assert parked("SLEEPING") == "unknown size"
    assert parked("WEDGED", parked_bytes=gib) == "1.0 GiB in host memory"
    assert parked("RUNNING") == ""


def test_a_table_says_that_a_workload_has_yielded() -> None:
    def state(name: str) -> str:
        status = WorkloadStatus(state=WorkloadState.Value(f"WORKLOAD_STATE_{name}"), yielded=True)
        return tables._workload_state(Workload(status=status))

    assert [state("SUSPENDED"), state("FAILED")] == ["SUSPENDED (yielded)", "FAILED"]


def test_a_table_names_all_workloads_of_a_swap() -> None:
    swap = Command(command_id="c-1", workload_id="w-1")
    for name in ("w-1", "w-2"):
        swap.operation.remap.moves.add(workload_id=name)
    stop = Command(command_id="c-2", workload_id="w-3")
    stop.operation.stop.SetInParent()
    cordon = Command(worker_id="worker-a")
    cordon.operation.cordon.gpu_uuids.append("GPU-1")

    class Services:
        async def ListCommands(self, request: ListCommandsRequest, **call: Any) -> ListCommandsResponse:
            return ListCommandsResponse(commands=[swap, stop, cordon, Command(worker_id="unknown")])

        async def ListWorkers(self, request: ListWorkersRequest, **call: Any) -> ListWorkersResponse:
            return ListWorkersResponse(workers=[Worker(worker_id="worker-a", name="alpha")])

        async def ListWorkloads(self, request: ListWorkloadsRequest, **call: Any) -> ListWorkloadsResponse:
            found = [Workload(workload_id=f"w-{at}", name=name) for at, name in ((1, "one"), (2, "two"))]
            return ListWorkloadsResponse(workloads=found)

    services: Any = Services()
    rows, _ = asyncio.run(tables._commands(Api(*[services] * len(Api._fields)), ""))
    assert [row[4] for row in rows] == ["one, two", "w-3", "alpha, GPU-1", "unknown"]
