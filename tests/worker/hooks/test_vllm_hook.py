"""The imitated engines do with requests what the real ones' sources say."""

import json

import pytest

from tests.worker.framework_servers import serving
from tests.worker.sglang_server import SglangServer
from tests.worker.vllm_engine import MODES, VllmEngine


@pytest.fixture
def engine() -> VllmEngine:
    return VllmEngine()


def test_an_idle_engine_sleeps_at_once_in_each_mode(engine: VllmEngine) -> None:
    for mode in MODES:
        assert engine.sleep(1, mode).is_set()
        assert engine.says_it_sleeps
        engine.wake_up([])
        assert not engine.says_it_sleeps


def test_abort_ends_requests_and_sleeps(engine: VllmEngine) -> None:
    request = engine.begin()
    assert engine.sleep(1, "abort").is_set()
    assert request.finish_reason == "abort"


def test_keep_freezes_requests_until_the_engine_is_awake(engine: VllmEngine) -> None:
    request = engine.begin()
    assert engine.sleep(1, "keep").is_set()
    engine.finish(request)
    assert not request.ended.is_set()
    engine.wake_up([])
    engine.finish(request)
    assert request.finish_reason == "stop"
    assert engine.alive


def test_wait_sleeps_once_the_running_requests_have_ended(engine: VllmEngine) -> None:
    request = engine.begin()
    slept = engine.sleep(1, "wait")
    later = engine.begin()
    assert engine.says_it_sleeps
    assert not engine.sleeping
    engine.finish(later)  # it waits, and does not run
    assert not later.ended.is_set()
    engine.finish(request)
    assert slept.is_set()
    assert engine.sleeping
    engine.wake_up([])
    engine.finish(later)
    assert later.finish_reason == "stop"


def test_a_pending_sleep_happens_after_a_wake_up(engine: VllmEngine) -> None:
    request = engine.begin()
    slept = engine.sleep(1, "wait")
    engine.wake_up([])
    assert not engine.says_it_sleeps
    engine.finish(request)
    assert slept.is_set()
    assert engine.sleeping
    engine.begin()
    assert not engine.alive


def test_a_pause_is_taken_back_by_a_resume(engine: VllmEngine) -> None:
    request = engine.begin()
    paused = engine.pause("wait")
    later = engine.begin()
    engine.finish(later)  # it waits, and does not run
    assert not later.ended.is_set()
    engine.resume()
    assert not engine.says_it_sleeps
    engine.finish(later)
    engine.finish(request)
    assert paused.is_set()
    assert not engine.sleeping
    assert later.finish_reason == "stop"


def test_a_resume_without_memory_ends_the_engine(engine: VllmEngine) -> None:
    engine.sleep(1, "wait")
    engine.begin()
    engine.resume()
    assert not engine.alive


def test_a_second_sleep_waits_with_the_first(engine: VllmEngine) -> None:
    request = engine.begin()
    slept = [engine.sleep(1, "wait"), engine.sleep(2, "wait")]
    engine.finish(request)
    assert [each.is_set() for each in slept] == [True, True]
    assert (engine.level, engine.weights) == (1, True)


def test_the_scheduler_goes_on_once_all_tags_are_awake(engine: VllmEngine) -> None:
    engine.sleep(2, "abort")
    request = engine.begin()
    engine.wake_up(["weights"])
    engine.wake_up(["weights"])
    assert engine.sleeping == {"kv_cache"}
    engine.finish(request)
    assert not request.ended.is_set()
    engine.wake_up(["kv_cache"])
    engine.finish(request)
    assert request.ended.is_set()


@pytest.mark.parametrize(
    ("mode", "finish_reason", "survives"),
    [("abort", "abort", True), ("retract", "", True), ("in_place", "", False)],
)
def test_sglang_dies_of_a_release_while_requests_are_under_way(
    mode: str, finish_reason: str, survives: bool
) -> None:
    with serving(SglangServer()) as server:
        request = server.begin()
        server.serve("POST", "/pause_generation", json.dumps({"mode": mode}).encode())
        server.serve("POST", "/release_memory_occupation", b'{"tags": ["weights"]}')
        assert (request.finish_reason, server.alive) == (finish_reason, survives)
