"""Hosts and their GPUs in a real browser: figures that no watch publishes."""

import json
import re
import time
from typing import Final

import pytest
from leasehold.v1.lease_pb2 import ForeignProcess, GpuLease
from leasehold_web.documents import sample_row
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, TIMEOUT_MS, Complaints, next_request, open_page, slot
from .conftest import WebFleet

WORKER: Final = {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED", "gpu_count": 1}
GPU: Final = {"uuid": "GPU-1", "worker_id": "worker-a", "name": "H100", "slot": 0, "state": "FOREIGN"}


def test_a_sample_has_the_bytes_of_foreign_processes() -> None:
    lease = GpuLease(foreign_processes=[ForeignProcess(pid=7), ForeignProcess(pid=8, device_memory_bytes=0)])
    assert sample_row(lease) == {"foreign_bytes": {"8": 0}}
    assert sample_row(GpuLease()) == {}


@pytest.mark.long
def test_the_page_of_a_host_shows_the_polled_resources(browser: Browser, fleet: WebFleet) -> None:
    """The live view has those of the last published change."""

    def tell(route: Route) -> None:
        found = json.loads(route.fetch().text())
        found["worker"]["resources"]["memory_free_bytes"] = 3 * 2**20
        route.fulfill(json=found)

    with open_page(browser, fleet.url, fleet.token) as page:
        page.route("**/api/workers/*", tell)
        page.click(".host-name a")
        expect(page.locator(".resource", has_text="Host memory")).to_contain_text("3.0 MiB of")


@pytest.mark.long
def test_the_drawer_shows_the_polled_memory_of_foreign_processes(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A watch tells a change of these processes only."""
    gpu = {**GPU, "foreign_processes": [{"pid": 7, "user": "ann", "device_memory_bytes": 2**30}]}
    changes = [["worker", "worker-a", WORKER], ["gpu", "GPU-1", gpu]]
    samples = {"GPU-1": {"foreign_bytes": {"7": 5 * 2**30}}}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/samples?*", lambda route: route.fulfill(json=samples))
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        page.click(".slot")
        expect(page.locator(".drawer")).to_contain_text("7 ann  5.0 GiB")


@pytest.mark.long
@pytest.mark.parametrize(("state", "changed"), [("LEASED", "3 d ago"), ("CORDONED", "4 h ago")])
def test_the_drawer_dates_a_state_by_its_cordon_only_if_it_is_one(
    browser: Browser, web_fleet: WebFleet, state: str, changed: str
) -> None:
    """A cordon of the host does not change the state of its free GPUs, and a cordoned lease goes on."""
    now_ms = time.time_ns() // 1_000_000
    cordon = {"reason": "fan", "cordon_time": now_ms - 4 * 3_600_000}
    gpu = {**GPU, "state": state, "since": now_ms - 3 * 86_400_000 - 1000, "cordon": cordon}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        changes = [["worker", "worker-a", WORKER], ["gpu", "GPU-1", gpu]]
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        page.click(".slot")
        expect(page.locator(".drawer")).to_contain_text(f"changed {changed}")
        expect(page.locator(".drawer")).to_contain_text("fan, 4 h ago")


@pytest.mark.long
def test_a_link_to_a_gpu_shows_it_once_the_fleet_is_loaded(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def load(uuid: str) -> None:
            page.goto(f"{web_fleet.url}?gpu={uuid}")
            page.wait_for_function("() => Boolean(window.source?.onmessage)")
            for number in range(60):
                host = {"worker_id": f"w-{number}", "name": f"host-{number}"}
                tile = {"uuid": f"GPU-{number}", "worker_id": f"w-{number}"}
                changes = [["worker", f"w-{number}", WORKER | host], ["gpu", f"GPU-{number}", GPU | tile]]
                page.evaluate("tell", {"changes": changes})
            page.evaluate("tell", {"state": {}})

        page.add_init_script(SCRIPTED_STREAM)
        load("GPU-50")
        expect(page.locator(".drawer")).to_contain_text("GPU-50")
        expect(page.locator(".slot.chosen")).to_be_in_viewport()
        expect(page.locator(".notice")).to_have_count(0)
        load("GPU-70")
        expect(page.locator(".notice")).to_contain_text("No GPU has this UUID now.")
        expect(page.locator(".drawer")).to_have_count(0)


@pytest.mark.long
def test_a_workload_of_a_deleted_host_has_the_names_of_the_history(
    browser: Browser, web_fleet: WebFleet
) -> None:
    hooks = [{"name": "engine", "vllm": {"base_url": "http://127.0.0.1:8000"}}]
    workload = {"workload_id": "w-1", "name": "old", "worker_id": "worker-a", "spec": {"hooks": hooks}}
    answer = {"workload": {**workload, "status": {"state": "FAILED"}}, "commands": [], "events": []}
    span = {"span_id": "s-1", "state": "LEASED", "workload_id": "w-1", "gpu_uuid": "GPU-1", "slot": 3}
    span |= {"worker_id": "worker-a", "worker_name": "gamma", "begin_time": 1_000, "end_time": 2_000}
    history = {"spans": [span], "parked": [], "is_truncated": False, "time": 9_000}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/workloads/w-1", lambda route: route.fulfill(json=answer))
        page.route("**/api/history?*", lambda route: route.fulfill(json=history))
        page.goto(f"{web_fleet.url}workloads/w-1")
        expect(page.locator(".facts").first).to_contain_text("gamma (deleted)")
        expect(page.locator('a[href="/workers/worker-a"]')).to_have_count(0)
        expect(page.locator(".mini tbody tr")).to_contain_text("gamma/3")
        expect(page.get_by_text("engine: vllm http://127.0.0.1:8000")).to_be_visible()


@pytest.mark.long
def test_checkpoints_are_asked_for_again_once_they_may_be_others(browser: Browser, fleet: WebFleet) -> None:
    asked: list[str] = []
    with open_page(browser, fleet.url, fleet.token) as page:
        page.on("request", lambda request: asked.append(request.url))

        def wait_asked(before: int) -> None:
            end = time.monotonic() + TIMEOUT_MS / 1000
            while sum(one.endswith("/checkpoints") for one in asked) <= before:
                assert time.monotonic() < end, page.locator("main").inner_text()
                page.wait_for_timeout(20)

        page.goto(f"{fleet.url}workloads/train")
        wait_asked(0)
        expect(page.get_by_text("No checkpoint on the disk of its worker.")).to_be_visible()
        page.wait_for_timeout(500)
        before = sum(one.endswith("/checkpoints") for one in asked)
        fleet.fleet.cli("suspend", "train")
        wait_asked(before)


@pytest.mark.long
def test_the_row_of_a_refused_host_tells_why(browser: Browser, web_fleet: WebFleet) -> None:
    worker = {**WORKER, "state": "DISCONNECTED", "refusal": "worker/alpha is blocked"}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "changes": [["worker", "worker-a", worker]], "state": {}})
        expect(page.locator(".host .note")).to_have_text("refused: worker/alpha is blocked")
        lacking = [{"name": "commands", "reason": "the disk is full"}]
        changes = [["worker", "worker-a", {**WORKER, "capabilities": lacking}]]
        page.evaluate("tell", {"changes": changes, "state": {}})
        expect(page.locator(".host .note")).to_have_text("no commands: the disk is full")


UNPOLLED: Final = """
const setEach = window.setInterval;
window.setInterval = (call, pause) => (pause === 5000 ? 0 : setEach(call, pause));
const setOnce = window.setTimeout;
window.setTimeout = (call, pause) => (pause === 1000 ? 0 : setOnce(call, pause));
"""
"""Neither the poll of the host nor the word of a late connection draws the page again."""


@pytest.mark.long
def test_the_page_of_a_host_keeps_the_focus_and_ignores_events_of_other_hosts(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A workload has a link beside its GPU, and another one among the workloads."""
    gpu = {**GPU, "state": "LEASED", "workload_id": "w-1", "workload_name": "one"}
    workload = {"workload_id": "w-1", "name": "one", "worker_id": "worker-a", "status": {"state": "RUNNING"}}
    changes = [["worker", "worker-a", WORKER], ["gpu", "GPU-1", gpu], ["workload", "w-1", workload]]
    answer = {"worker": WORKER, "gpus": [{"gpu": GPU}], "events": []}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/workers/*", lambda route: route.fulfill(json=answer))
        page.add_init_script(SCRIPTED_STREAM + UNPOLLED)
        page.goto(f"{web_fleet.url}workers/alpha")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        links = page.locator('.card a[href="/workloads/w-1"]')
        expect(links).to_have_count(2)
        links.last.focus()
        former = page.locator(".cards[data-former]")
        for _ in range(20):  # until the changes of the begin are drawn
            page.evaluate("document.querySelector('.cards').dataset.former = ''")
            page.wait_for_timeout(400)
            if former.count():
                break
        page.evaluate("tell", {"changes": [["event", "e-1", {"event_id": "e-1", "worker_id": "worker-b"}]]})
        page.wait_for_timeout(400)
        expect(former).to_have_count(1)
        event = {"event_id": "e-2", "worker_id": "worker-a", "message": "a fan", "time": 1}
        page.evaluate("tell", {"changes": [["event", "e-2", event]]})
        expect(page.locator(".events")).to_contain_text("a fan")
        expect(former).to_have_count(0)
        expect(links.last).to_be_focused()


@pytest.mark.long
def test_the_page_of_a_host_stays_scrolled(browser: Browser, web_fleet: WebFleet) -> None:
    """The table of GPUs is wider than a phone, and the list of events has a height of its own."""
    events = [
        {"event_id": f"e-{at:03}", "worker_id": "worker-a", "message": "a fan", "time": 1} for at in range(80)
    ]
    answer = {"worker": WORKER, "gpus": [{"gpu": GPU}], "events": events}
    phone = {"width": 390, "height": 844}
    with open_page(browser, web_fleet.url, web_fleet.token, viewport=phone) as page:
        page.route("**/api/workers/*", lambda route: route.fulfill(json=answer))
        page.add_init_script(SCRIPTED_STREAM + UNPOLLED)
        page.goto(f"{web_fleet.url}workers/alpha")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator(".events li")).to_have_count(80)
        table, list_ = page.locator(".scroll"), page.locator(".events")
        table.evaluate("one => { one.scrollLeft = 60; }")
        list_.evaluate("one => { one.scrollTop = 200; }")
        page.evaluate("document.querySelector('.cards').dataset.former = ''")
        changes = [["worker", "worker-a", {**WORKER, "state": "STALE"}]]
        page.evaluate("tell", {"changes": changes, "state": {}})
        expect(page.locator(".cards[data-former]")).to_have_count(0)
        assert table.evaluate("one => one.scrollLeft") == 60
        assert list_.evaluate("one => one.scrollTop") == 200


@pytest.mark.long
def test_the_alert_of_an_unknown_host_is_told_once(browser: Browser, web_fleet: WebFleet) -> None:
    unknown = {"reason": "UNKNOWN_WORKER", "message": "no worker has this name"}
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.clock.install()
        page.route("**/api/workers/*", lambda route: asked.append(route))
        page.goto(f"{web_fleet.url}workers/beta")
        next_request(page, asked).fulfill(status=404, json=unknown)
        alert = page.get_by_role("alert")
        expect(alert).to_have_text(unknown["message"])
        alert.evaluate("one => { one.dataset.former = ''; }")
        page.clock.fast_forward(5_000)
        next_request(page, asked).fulfill(status=404, json={**unknown, "message": "still none"})
        expect(alert).to_have_text("still none")
        expect(alert).to_have_attribute("data-former", "")


@pytest.mark.long
def test_the_fleet_tells_the_cordon_of_a_leased_gpu(browser: Browser, web_fleet: WebFleet) -> None:
    cordon = {"reason": "a cable"}
    leased = {**GPU, "state": "LEASED", "workload_id": "w-1", "workload_name": "one"}
    hosts = {"worker-a": WORKER, "worker-b": {**WORKER, "worker_id": "worker-b", "name": "beta"}}
    hosts["worker-c"] = {**WORKER, "worker_id": "worker-c", "name": "gamma"}
    hosts["worker-b"]["cordon"] = cordon
    changes: list[object] = [["worker", name, row] for name, row in hosts.items()]
    for number, name in enumerate(hosts):
        row = {**leased, "uuid": f"GPU-{number}", "worker_id": name}
        changes.append(["gpu", f"GPU-{number}", row | ({"cordon": cordon} if name == "worker-a" else {})])
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        names = page.locator(".host-name a")
        expect(names).to_have_text(["alpha", "beta", "gamma"])
        expect(page.locator(slot(page, 0))).to_have_attribute("aria-label", re.compile("cordoned"))
        page.fill("input[type=search]", "cordoned")
        expect(names).to_have_text(["alpha", "beta"])


FIGURES: Final = """
[...document.querySelectorAll(".figures")].map((row) => {
  const { left, right, bottom } = row.getBoundingClientRect();
  const shown = {};
  for (const one of row.querySelectorAll("span:not(.beside)")) {
    const box = one.getBoundingClientRect();
    const isShown = box.width > 0 && box.top < bottom;
    const isWhole = box.left >= left && box.right <= right && one.scrollWidth <= one.clientWidth;
    if (isShown) shown[one.textContent] = isWhole;
  }
  return shown;
})
"""
"""The figures that each GPU shows, and whether they are whole."""


@pytest.mark.long
def test_figures_of_a_gpu_are_whole_or_hidden(browser: Browser, web_fleet: WebFleet) -> None:
    total = 80 * 2**30
    samples = [(0.5, 0, 30), (73, 100, 78), (73, 5, 91)]
    memory, heat = ["0.5/80", "73/80", "73/80"], ["30°", "78°", "91°"]
    changes: list[object] = [["worker", "worker-a", {**WORKER, "gpu_count": len(samples) + 1}]]
    for number, (used, load, degrees) in enumerate(samples):
        sample = {
            "memory_used_bytes": used * 2**30,
            "utilization_percent": load,
            "temperature_celsius": degrees,
        }
        row = {**GPU, "uuid": f"GPU-{number}", "slot": number, "memory_total_bytes": total, "sample": sample}
        changes.append(["gpu", f"GPU-{number}", row])
    stopping = {"workload_id": "w-1", "name": "one", "worker_id": "worker-a", "status": {"state": "STOPPING"}}
    leased = {"state": "LEASED", "workload_id": "w-1", "workload_name": "one", "memory_total_bytes": total}
    changes.append(["workload", "w-1", stopping])
    changes.append(["gpu", "GPU-9", {**GPU, **leased, "uuid": "GPU-9", "slot": 9, "sample": sample}])
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        expect(page.locator(".figures")).to_have_count(4)
        for width in (760, 1000, 1110, 1200, 1280, 1366, 1600):
            page.set_viewport_size({"width": width, "height": 800})
            shown = page.evaluate(FIGURES)
            assert all(whole for figures in shown for whole in figures.values()), (width, shown)
            *sampled, last = shown
            assert all(name in one for name, one in zip(memory, sampled, strict=True)), (width, shown)
            if width > 760:
                assert all(name in one for name, one in zip(heat, sampled, strict=True)), (width, shown)
            assert "stopping" in last
        loads = {"0%", "100%", "5%"}
        assert loads <= {figure for figures in shown for figure in figures}, shown


@pytest.mark.long
def test_the_end_of_a_choice_of_gpus_keeps_the_focus(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(slot(page, 0))
        page.click('.drawer button:text-is("Move…")')
        expect(page.locator(slot(page, 1))).to_be_focused()
        page.locator('.pick-bar button:text-is("Cancel")').focus()
        page.keyboard.press("Enter")
        expect(page.locator(".pick-bar")).to_have_count(0)
        expect(page.locator(".slot:focus")).to_have_count(1)


@pytest.mark.long
def test_the_filter_does_not_hide_the_host_of_a_choice_of_gpus(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(slot(page, 0))
        page.click('.drawer button:text-is("Move…")')
        page.fill("input[type=search]", "no such host")
        expect(page.locator(slot(page, 1))).to_be_visible()
        page.click('.pick-bar button:text-is("Cancel")')
        expect(page.locator(slot(page, 1))).to_have_count(0)


@pytest.mark.long
def test_a_choice_of_gpus_ends_when_the_fleet_is_left(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}workloads/train")
        page.click('button:text-is("Move…")')
        expect(page.locator(".pick-bar")).to_have_count(1)
        page.go_back()
        page.wait_for_url("**/workloads/train")
        expect(page.locator('button:text-is("Move…")')).to_be_visible()
        page.go_forward()
        page.wait_for_url(fleet.url)
        expect(page.locator(slot(page, 0))).to_be_visible()
        expect(page.locator(".pick-bar")).to_have_count(0)


@pytest.mark.long
def test_a_long_identity_leaves_room_for_the_role(browser: Browser, web_fleet: WebFleet) -> None:
    phone = {"width": 360, "height": 740}
    with open_page(browser, web_fleet.url, web_fleet.token, viewport=phone) as page:
        identity = f"user/{'x' * 80}"
        page.route(
            "**/api/session",
            lambda route: route.fulfill(json={**json.loads(route.fetch().text()), "identity": identity}),
        )
        page.reload()
        who = page.locator("#who")
        expect(who).to_contain_text(f"{identity} · ")
        assert who.evaluate("one => one.scrollWidth <= one.clientWidth")
        assert who.locator("b").evaluate("one => one.scrollWidth > one.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
