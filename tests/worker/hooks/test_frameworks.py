"""The vllm and sglang hooks, against servers that speak the real routes."""

import datetime
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import WeightStrategy
from leasehold.v1.hook_pb2 import Hook, HttpHook, SglangHook, VllmHook, WorkDrain
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks import freed_memory, runner
from leasehold_worker.hooks.context import HookRecord

from tests.worker.framework_servers import Answer, Pending, VllmServer, serving
from tests.worker.hook_contexts import DISCARD, OFFLOAD, RETAIN, context
from tests.worker.sglang_server import SglangServer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are asked again sooner than real ones."""
    monkeypatch.setattr("leasehold_worker.hooks.vllm_hook.BACKOFF_S", 0.01)
    monkeypatch.setattr("leasehold_worker.hooks.http_hook.IDLE_INTERVAL_S", 0.02)


@pytest.fixture
def vllm() -> Iterator[VllmServer]:
    with serving(VllmServer()) as server:
        yield server


@pytest.fixture
def sglang() -> Iterator[SglangServer]:
    with serving(SglangServer()) as server:
        yield server


def expire_first_action(monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]) -> None:
    """Has the timeout of the first action of hooks pass once a condition holds.

    Later actions, such as a rollback, have the timeouts of their hooks.
    """
    actions = itertools.count()

    async def expire(scope: trio.CancelScope) -> None:
        while not when():  # noqa: ASYNC110 - the server is not trio's
            await trio.sleep(0.01)
        scope.deadline = trio.current_time()

    @contextmanager
    def fail_after(limit_s: float) -> Iterator[None]:
        with trio.fail_after(limit_s) as scope:
            if next(actions) == 0:
                trio.lowlevel.spawn_system_task(expire, scope)
            yield

    replaced = SimpleNamespace(**{**vars(trio), "fail_after": fail_after})
    monkeypatch.setattr(runner, "trio", replaced)


def engine(server: VllmServer, *tags: str, communicators: bool = False) -> Hook:
    hook = VllmHook(url=server.url, wake_tags=tags)
    if communicators:
        hook.suspend_method, hook.resume_method = "suspend_nccl", "resume_nccl"
    return Hook(name="engine", vllm=hook)


async def test_vllm_sleeps_at_level_1_and_wakes(vllm: VllmServer, tmp_path: Path) -> None:
    used = context([engine(vllm, communicators=True)], tmp_path, OFFLOAD, measure=vllm.measure)
    await runner.down(used)
    assert vllm.sleeping
    assert not vllm.communicators
    assert vllm.calls == [
        "POST /pause?mode=wait&wait_for_inflight_requests=true",
        "POST /sleep?level=1&mode=wait",
        "GET /is_sleeping",
        'POST /collective_rpc {"method": "suspend_nccl"}',
    ]
    vllm.calls.clear()
    assert await runner.up(used) == []
    assert vllm.serves
    assert vllm.calls == [
        'POST /collective_rpc {"method": "resume_nccl"}',
        "GET /is_sleeping",
        "POST /wake_up",
        "GET /is_sleeping",
        "POST /resume",
        "POST /reset_prefix_cache",
    ]
    assert not used.record.notes


async def test_vllm_loads_discarded_weights_before_it_is_awake(vllm: VllmServer, tmp_path: Path) -> None:
    used = context([engine(vllm)], tmp_path, DISCARD, measure=vllm.measure)
    await runner.down(used)
    assert not vllm.weights
    vllm.calls.clear()
    await runner.up(used)
    assert vllm.serves
    assert vllm.calls[1:4] == [
        "POST /wake_up?tags=weights",
        'POST /collective_rpc {"method": "reload_weights"}',
        "POST /wake_up?tags=kv_cache",
    ]


@pytest.mark.parametrize("strategy", [OFFLOAD, DISCARD], ids=["offload", "discard"])
@pytest.mark.parametrize("tags", [("kv_cache", "weights"), ("weights", "kv_cache")])
async def test_vllm_wakes_tags_one_after_the_other(
    vllm: VllmServer, tmp_path: Path, tags: tuple[str, ...], strategy: WeightStrategy.ValueType
) -> None:
    used = context([engine(vllm, *tags)], tmp_path, strategy, measure=vllm.measure)
    await runner.down(used)
    await runner.up(used)
    # Dropped weights are always first: a server that is awake must have them.
    order = tags if strategy == OFFLOAD else ("weights", "kv_cache")
    assert [call for call in vllm.calls if "wake" in call] == [f"POST /wake_up?tags={tag}" for tag in order]
    assert vllm.serves


async def test_vllm_sleeps_until_its_weights_are_loaded(vllm: VllmServer, tmp_path: Path) -> None:
    used = context([engine(vllm, "kv_cache", "weights")], tmp_path, DISCARD, measure=vllm.measure)
    await runner.down(used)
    vllm.answers = {"/collective_rpc": [500, 500, 500]}
    with pytest.raises(OperationError, match="reload_weights"):
        await runner.up(used)
    await runner.up(used)
    assert vllm.serves


async def test_vllm_that_is_not_woken_whole_is_told(
    vllm: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_worker.hooks.vllm_hook.AWAKE_DEADLINE_S", 0.1)
    used = context([engine(vllm, "weights")], tmp_path, OFFLOAD, measure=vllm.measure)
    await runner.down(used)
    with pytest.raises(OperationError, match=r"still sleeps: wake all of its tags"):
        await runner.up(used)


async def test_vllm_keeps_weights_that_are_retained(vllm: VllmServer, tmp_path: Path) -> None:
    used = context([engine(vllm, communicators=True)], tmp_path, RETAIN, measure=vllm.measure)
    await runner.down(used)
    await runner.up(used)
    assert set(vllm.paths()) == {"/collective_rpc"}
    assert vllm.serves


async def test_vllm_is_asked_again_after_a_passing_fault(vllm: VllmServer, tmp_path: Path) -> None:
    vllm.answers = {"/sleep": [500, 0], "/is_sleeping": [503]}
    used = context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure)
    await runner.down(used)
    assert vllm.paths() == ["/pause"] + ["/sleep"] * 3 + ["/is_sleeping"] * 2


async def test_vllm_that_goes_on_failing_is_woken(vllm: VllmServer, tmp_path: Path) -> None:
    vllm.answers = {"/collective_rpc": [500, 500, 500]}
    used = context([engine(vllm, communicators=True)], tmp_path, OFFLOAD, measure=vllm.measure)
    with pytest.raises(OperationError) as error:
        await runner.down(used)
    assert error.value.reason == errors_pb2.ERROR_REASON_HOOK_FAILED
    assert error.value.metadata["hook"] == "engine"
    assert "suspend_nccl" in error.value.message
    assert "answered 500" in error.value.message
    assert vllm.serves
    assert used.warnings == []


async def test_vllm_without_its_development_routes_is_told_so(vllm: VllmServer, tmp_path: Path) -> None:
    vllm.answers = {"/pause": [404], "/sleep": [404], "/is_sleeping": [404]}
    used = context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure)
    with pytest.raises(OperationError, match=r"VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"):
        await runner.down(used)
    assert vllm.paths() == ["/pause", "/sleep", "/is_sleeping"]
    assert len(used.warnings) == 1  # what could not be undone


async def test_a_server_that_is_not_there_fails_and_is_told(tmp_path: Path) -> None:
    with serving(VllmServer()) as server:
        url = server.url
    hook = Hook(name="engine", vllm=VllmHook(url=url))
    with pytest.raises(OperationError, match=r"got no answer .*refused.*check that the server runs"):
        await runner.down(context([hook], tmp_path, OFFLOAD))


async def test_a_slow_sleep_times_out_and_is_undone(
    vllm: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_first_action(monkeypatch, lambda: "/sleep" in vllm.paths())
    vllm.held.add("/sleep")
    vllm.sleeping = {"weights", "kv_cache"}  # it got there after all
    with pytest.raises(OperationError, match=r"timed out after [0-9]+ s \(POST .*/sleep.*did not answer\)"):
        await runner.down(context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure))
    assert vllm.serves


async def test_vllm_sleeps_once_its_requests_have_ended(vllm: VllmServer, tmp_path: Path) -> None:
    request = vllm.begin()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.down, context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure))
        await vllm.wait_call()
        assert not vllm.sleeping
        vllm.finish(request)
    assert request.finish_reason == "stop"
    assert vllm.sleeping


@pytest.mark.parametrize("strategy", [OFFLOAD, DISCARD], ids=["offload", "discard"])
@pytest.mark.parametrize("way", ["timeout", "cancel"])
async def test_vllm_does_not_sleep_after_its_sleep_was_given_up(
    vllm: VllmServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    strategy: WeightStrategy.ValueType,
) -> None:
    request = vllm.begin()
    used = context([engine(vllm)], tmp_path, strategy, measure=vllm.measure)
    if way == "timeout":
        expire_first_action(monkeypatch, lambda: "/pause" in vllm.paths())
        with pytest.raises(OperationError, match="timed out"):
            await runner.down(used)
    else:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runner.down, used)
            await vllm.wait_call()
            nursery.cancel_scope.cancel()
    # Nothing else of the way up: weights would be loaded, and the cache reset, under requests.
    assert vllm.paths() == ["/pause", "/resume"]
    vllm.finish(request)
    assert vllm.serves
    assert not used.record.notes


async def test_a_worker_that_died_while_vllm_waited_for_requests_lets_it_go_on(
    vllm: VllmServer, tmp_path: Path
) -> None:
    request = vllm.begin()
    vllm.pause("wait")
    after_restart = context([engine(vllm)], tmp_path, DISCARD, record=HookRecord(["engine"]))
    assert await runner.roll_back(after_restart) == []
    assert vllm.paths() == ["/resume"]
    vllm.finish(request)
    assert vllm.serves


async def test_vllm_without_pause_is_put_to_sleep_and_woken(vllm: VllmServer, tmp_path: Path) -> None:
    """Servers before 0.12."""
    vllm.answers = {"/pause": [404], "/resume": [404]}
    used = context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure)
    await runner.down(used)
    assert vllm.sleeping
    assert await runner.up(used) == []
    assert vllm.serves


async def test_a_prefix_cache_that_is_not_reset_is_a_warning(vllm: VllmServer, tmp_path: Path) -> None:
    used = context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure)
    await runner.down(used)
    vllm.answers = {"/reset_prefix_cache": [400]}
    (warning,) = await runner.up(used)
    assert "the prefix cache was not reset" in warning
    assert vllm.serves


async def test_a_wake_that_fails_is_told_and_can_be_tried_again(vllm: VllmServer, tmp_path: Path) -> None:
    used = context([engine(vllm)], tmp_path, DISCARD, measure=vllm.measure)
    await runner.down(used)
    vllm.answers = {"/collective_rpc": [400]}
    with pytest.raises(OperationError, match=r"after the restore failed"):
        await runner.up(used)
    assert vllm.sleeping
    await runner.up(used)
    assert vllm.serves


async def test_a_rollback_of_nobody_knows_what_can_be_repeated(vllm: VllmServer, tmp_path: Path) -> None:
    await runner.down(context([engine(vllm)], tmp_path, DISCARD, measure=vllm.measure))
    for _ in range(3):
        after_restart = context([engine(vllm)], tmp_path, DISCARD, record=HookRecord(None))
        assert await runner.roll_back(after_restart) == []
        assert vllm.serves
    assert vllm.paths().count("/wake_up") == 2


async def test_memory_that_is_claimed_and_not_freed_fails_and_is_undone(
    vllm: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freed_memory, "FREED_DEADLINE_S", 0.2)
    vllm.frees = False
    with pytest.raises(OperationError) as error:
        await runner.down(context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure))
    assert error.value.reason == errors_pb2.ERROR_REASON_MEMORY_NOT_FREED
    assert error.value.metadata["bytes_before"] == error.value.metadata["bytes_after"] == str(10 * 2**30)
    assert vllm.serves


async def test_memory_that_falls_a_little_later_is_waited_for(vllm: VllmServer, tmp_path: Path) -> None:
    readings = iter([1000, 1000, 1000, 400])

    async def measure() -> int | None:
        return next(readings)

    await runner.down(context([engine(vllm)], tmp_path, OFFLOAD, measure=measure))
    assert next(readings, None) is None


async def test_memory_that_nvml_does_not_tell_is_a_warning(vllm: VllmServer, tmp_path: Path) -> None:
    used = context([engine(vllm)], tmp_path, OFFLOAD)
    await runner.down(used)
    assert "NVML could not confirm" in used.warnings[0]


def model(server: SglangServer) -> Hook:
    hook = Hook(name="model", sglang=SglangHook(url=server.url))
    hook.timeout.FromTimedelta(datetime.timedelta(seconds=10))
    return hook


@pytest.mark.parametrize("strategy", [OFFLOAD, DISCARD])
async def test_sglang_is_idle_before_it_releases(sglang: SglangServer, tmp_path: Path, strategy: int) -> None:
    sglang.in_flight = 3
    sglang.info["enable_weights_cpu_backup"] = strategy == OFFLOAD
    used = context(
        [model(sglang)], tmp_path, OFFLOAD if strategy == OFFLOAD else DISCARD, measure=sglang.measure
    )
    await runner.down(used)
    assert sglang.paths() == [
        "/get_server_info",
        "/flush_cache",
        "/flush_cache",
        "/flush_cache",
        "/pause_generation",
        "/flush_cache",
        "/release_memory_occupation",
    ]
    assert sglang.released == {"kv_cache", "weights"}
    await runner.up(used)
    assert sglang.serves
    assert ("/update_weights_from_disk" in sglang.paths()) == (strategy == DISCARD)
    assert not used.record.notes


async def test_sglang_that_would_lose_its_weights_is_refused(sglang: SglangServer, tmp_path: Path) -> None:
    sglang.info["enable_weights_cpu_backup"] = False
    with pytest.raises(OperationError, match=r"--enable-weights-cpu-backup, or discard"):
        await runner.down(context([model(sglang)], tmp_path, OFFLOAD, measure=sglang.measure))
    sglang.info["enable_memory_saver"] = False
    with pytest.raises(OperationError, match=r"--enable-memory-saver"):
        await runner.down(context([model(sglang)], tmp_path, DISCARD, measure=sglang.measure))
    assert sglang.serves
    assert "/release_memory_occupation" not in sglang.paths()


async def test_sglang_releases_once_its_requests_have_ended(sglang: SglangServer, tmp_path: Path) -> None:
    request = sglang.begin()
    async with trio.open_nursery() as nursery:
        used = context([model(sglang)], tmp_path, OFFLOAD, measure=sglang.measure)
        nursery.start_soon(runner.down, used)
        while "/flush_cache" not in sglang.paths():  # noqa: ASYNC110 - the server is not trio's
            await trio.sleep(0.01)
        assert not sglang.released
        sglang.finish(request)
    assert request.finish_reason == "stop"
    assert sglang.alive
    assert sglang.released
    later = sglang.begin()  # it waits at the door
    await runner.up(used)
    sglang.finish(later)
    assert later.finish_reason == "stop"


async def test_sglang_that_is_given_up_while_requests_run_goes_on(
    sglang: SglangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = sglang.begin()
    expire_first_action(monkeypatch, lambda: "/flush_cache" in sglang.paths())
    with pytest.raises(OperationError, match="timed out"):
        await runner.down(context([model(sglang)], tmp_path, OFFLOAD, measure=sglang.measure))
    sglang.finish(request)
    assert request.finish_reason == "stop"
    assert sglang.serves


async def test_sglang_that_stays_busy_is_left_alone(
    sglang: SglangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang.in_flight = 10**6
    expire_first_action(monkeypatch, lambda: sglang.paths().count("/flush_cache") > 1)
    with pytest.raises(OperationError, match="timed out"):
        await runner.down(context([model(sglang)], tmp_path, OFFLOAD, measure=sglang.measure))
    assert sglang.serves
    assert "/resume_memory_occupation" not in sglang.paths()  # it would end the server


async def test_sglang_that_refuses_to_release_is_not_resumed(sglang: SglangServer, tmp_path: Path) -> None:
    sglang.answers = {"/release_memory_occupation": [400]}
    used = context([model(sglang)], tmp_path, DISCARD, measure=sglang.measure)
    with pytest.raises(OperationError, match=r"answered 400"):
        await runner.down(used)
    assert sglang.serves
    assert not used.record.notes


async def test_sglang_older_than_pausing_is_parked_all_the_same(sglang: SglangServer, tmp_path: Path) -> None:
    sglang.answers = {"/pause_generation": [404], "/continue_generation": [404]}
    used = context([model(sglang)], tmp_path, OFFLOAD, measure=sglang.measure)
    await runner.down(used)
    await runner.up(used)
    assert sglang.serves


async def test_sglang_is_rolled_back_by_what_was_noted(sglang: SglangServer, tmp_path: Path) -> None:
    kept: list[frozenset[str]] = []

    async def save(notes: frozenset[str]) -> None:
        kept.append(notes)

    await runner.down(
        context([model(sglang)], tmp_path, DISCARD, measure=sglang.measure, record=HookRecord(save=save))
    )
    for _ in range(3):
        after_restart = context([model(sglang)], tmp_path, DISCARD, record=HookRecord(kept[-1], save))
        assert await runner.roll_back(after_restart) == []
        assert sglang.serves
    assert kept[-1] == frozenset()


async def test_sglang_is_not_resumed_on_a_suspicion(sglang: SglangServer, tmp_path: Path) -> None:
    after_restart = context([model(sglang)], tmp_path, DISCARD, record=HookRecord(None))
    (warning,) = await runner.roll_back(after_restart)
    assert "it is unknown whether" in warning
    assert sglang.serves


async def test_sglang_loads_its_weights_at_the_second_attempt(sglang: SglangServer, tmp_path: Path) -> None:
    sglang.info["enable_weights_cpu_backup"] = False
    used = context([model(sglang)], tmp_path, DISCARD, measure=sglang.measure)
    await runner.down(used)
    sglang.answers = {"/update_weights_from_disk": [400]}
    with pytest.raises(OperationError, match=r"update_weights_from_disk answered 400"):
        await runner.up(used)
    await runner.up(used)
    assert sglang.serves


async def test_a_server_is_drained_first_and_admits_last(vllm: VllmServer, tmp_path: Path) -> None:
    def request(method: str, path: str) -> HttpHook:
        return HttpHook(method=method, url=vllm.url + path)

    hook = engine(vllm)
    hook.drain.CopyFrom(
        WorkDrain(
            stop_admitting=request("POST", "/pause?mode=wait"),
            idle=request("GET", "/idle"),
            admit_again=request("POST", "/resume"),
        )
    )
    vllm.answers = {"/pause": [200], "/idle": [503, 503, 200], "/resume": [200]}
    used = context([hook], tmp_path, OFFLOAD, measure=vllm.measure)
    await runner.down(used)
    assert vllm.paths() == ["/pause", "/idle", "/idle", "/idle", "/pause", "/sleep", "/is_sleeping"]
    await runner.up(used)
    assert vllm.paths()[-1] == "/resume"


@pytest.mark.long
async def test_a_drain_that_does_not_end_aborts_and_admits_again(
    vllm: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_worker.hooks.http_hook.IDLE_INTERVAL_S", 60.0)
    hook = engine(vllm)
    hook.timeout.FromSeconds(3)  # passes in the pause after the first answer
    hook.drain.stop_admitting.MergeFrom(HttpHook(method="POST", url=f"{vllm.url}/pause"))
    hook.drain.idle.MergeFrom(HttpHook(method="GET", url=f"{vllm.url}/idle"))
    hook.drain.admit_again.MergeFrom(HttpHook(method="POST", url=f"{vllm.url}/resume"))
    vllm.answers = {"/pause": [200], "/idle": [503] * 100, "/resume": [200]}
    with pytest.raises(OperationError, match=r"work was still in flight; GET .*/idle answered 503"):
        await runner.down(context([hook], tmp_path, OFFLOAD, measure=vllm.measure))
    assert "/sleep" not in vllm.paths()
    assert vllm.paths()[-1] == "/resume"


class VastVllmServer(VllmServer):
    """A server of anybody's that fills its answers. It says all the time that it does not sleep."""

    def serve(self, method: str, target: str, body: bytes) -> Answer | Pending:
        if target.startswith("/is_sleeping"):
            return 200, {"is_sleeping": False, "more": [[]] * 100_000}
        return 200, None


async def test_a_vast_answer_is_not_read_again_and_again(tmp_path: Path) -> None:
    """The event loop reads what answers say."""
    with serving(VastVllmServer()) as server:
        used = context([engine(server)], tmp_path, OFFLOAD, measure=server.measure)
        with trio.fail_after(20), pytest.raises(OperationError, match="has at least 400"):
            await runner.down(used)
        assert server.paths().count("/is_sleeping") == 2, "once on the way down, and once on the way back"


async def test_a_vast_answer_to_a_reset_of_the_prefix_cache_is_a_warning(
    vllm: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = context([engine(vllm)], tmp_path, OFFLOAD, measure=vllm.measure)
    await runner.down(used)
    serve = vllm.serve

    def vast(method: str, target: str, body: bytes) -> Answer | Pending:
        return (200, "x" * 100_000) if target == "/reset_prefix_cache" else serve(method, target, body)

    monkeypatch.setattr(vllm, "serve", vast)
    (warning,) = await runner.up(used)
    assert "was not reset: the server's answer has at least 100002 bytes" in warning
    assert vllm.serves


async def test_sglang_has_settings_of_many_ranks(sglang: SglangServer, tmp_path: Path) -> None:
    sglang.info["internal_states"] = [{"model_path": "acme/tiny"}] * 20_000
    used = context([Hook(name="engine", sglang=SglangHook(url=sglang.url))], tmp_path, OFFLOAD)
    await runner.down(used)
    assert sglang.released
    await runner.up(used)
    assert sglang.serves
