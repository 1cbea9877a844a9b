"""Joints of the timeline: how the eye follows a workload, and how pointers move, zoom and open."""

import pytest
from playwright.sync_api import Browser, expect

from .browsers import open_page
from .conftest import WebFleet


@pytest.mark.long
def test_a_move_can_be_followed_on_the_timeline(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("remap", "train", "--to", "alpha/2")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click('nav a:text-is("Timeline")')
        canvas = page.locator("canvas[role=application]")
        canvas.focus()
        tip = page.locator(".tip")

        def shows_a_span() -> bool:  # once the history is there
            page.keyboard.press("ArrowDown")
            page.wait_for_timeout(100)
            return "train" in (tip.text_content() or "")

        fleet.fleet.wait(shows_a_span)
        for key in ("+", "-", "ArrowLeft", "n"):
            page.keyboard.press(key)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("train")
        expect(page.locator(".mini table tbody tr")).not_to_have_count(0)
        expect(page.locator(".command b", has_text="move")).to_be_visible()
        expect(page.locator(".output")).to_contain_text("count=")


@pytest.mark.long
def test_pointers_move_zoom_and_open_on_the_timeline(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token, has_touch=True) as page:
        page.goto(f"{fleet.url}timeline?range=3600000")
        pressed = page.locator('.segments [aria-pressed="true"]')
        expect(pressed).to_have_text("1 h")
        canvas = page.locator("canvas[role=application]")
        place = canvas.bounding_box()
        assert place is not None
        middle = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        page.mouse.move(*middle)
        page.keyboard.down("Control")
        page.mouse.wheel(0, 100)
        page.keyboard.up("Control")
        expect(pressed).to_have_count(0)  # between two of the ranges
        page.mouse.down()
        page.mouse.move(middle[0] + 80, middle[1], steps=4)
        page.mouse.up()
        expect(page.locator('button:text-is("Follow now")')).to_be_visible()

        page.goto(f"{fleet.url}timeline?range=60000")
        tip = page.locator(".tip b")
        # The row of alpha/0 is below axis, commands and the name of its host. Now is 2 % before the end.
        now = place["x"] + 0.98 * place["width"] - 8, place["y"] + 125

        def shows_the_span() -> bool:  # once the history is there
            page.mouse.move(now[0], now[1] + 300)
            page.mouse.move(*now)
            return tip.is_visible() and tip.text_content() == "train"

        fleet.fleet.wait(shows_the_span)
        page.mouse.move(now[0], now[1] + 300)
        expect(tip).to_be_hidden()
        page.touchscreen.tap(*now)
        expect(tip).to_have_text("train")
        page.wait_for_timeout(1_500)  # the text of a span that goes on changes each second
        assert page.url.endswith("/timeline?range=60000")
        page.touchscreen.tap(*now)
        expect(page.locator("h1")).to_contain_text("train")


JOINTS = """async () => {
  const { jointsOf } = await import("/static/spans.js");
  const span = (workload, gpu, begin, end, lease) => ({
    workload_id: workload, gpu_uuid: gpu, slot: Number(gpu), state: "LEASED", lease_id: lease,
    begin_time: begin,
    ...(end ? { end_time: end } : {}),
  });
  const parked = (...fields) => ({ ...span(...fields), state: "UNSPECIFIED", parked: true });
  const spans = [
    span("moved", "0", 0, 10000, "a"), span("moved", "3", 10000, 0, "b"),
    span("parked", "1", 0, 5000, "c"), parked("parked", "1", 5010, 60000),
    span("parked", "2", 60000, 70000, "d"), parked("parked", "2", 70010, 0),
    span("pair", "4", 0, 9000, "e"), span("pair", "5", 0, 9000, "e"),
    span("pair", "6", 9001, 0, "f"), span("pair", "7", 9001, 0, "f"),
    span("short", "9", 0, 5000, "h"), span("short", "10", 5300, 0, "i"),
    span("half", "11", 0, 5000, "j"), span("half", "12", 0, 5000, "j"),
    span("half", "10", 5000, 0, "k"), span("half", "11", 5000, 0, "k"),
    span("ended", "8", 0, 5000, "g"),
    span("crossed", "20", 0, 9000, "l"), span("crossed", "21", 0, 9000, "l"),
    span("crossed", "22", 9000, 20000, "m"), span("crossed", "23", 9000, 20000, "m"),
    span("crossed", "22", 20000, 30000, "n"), span("crossed", "23", 20000, 30000, "n"),
    span("crossed", "20", 60000, 0, "o"), span("crossed", "21", 60000, 0, "o"),
    span("swapped", "24", 0, 9000, "p"), span("swapped", "25", 0, 9000, "p"),
    span("swapped", "26", 9000, 0, "q"), span("swapped", "27", 9000, 0, "q"),
    span("stopped", "28", 0, 5000, "r"), parked("stopped", "28", 5001, 60500),
    parked("inside", "30", 5000, 90000), parked("inside", "31", 5000, 90000),
    parked("back", "32", 5000, 60000), span("back", "33", 60000, 0, "s"),
    span("short park", "34", 0, 5000, "t"), parked("short park", "34", 5000, 5010),
    span("short park", "35", 5010, 9000, "u"), span("short park", "36", 9000, 0, "v"),
    span("outage", "37", 0, 5000, "w"), parked("outage", "37", 5001, 60000),
    span("outage", "38", 58500, 0, "x"),
  ];
  const command = (create_time, end_time, operation, pairs) => ({
    state: "SUCCEEDED", create_time, end_time, ...operation,
    result: { applied_pairs: pairs.map(([old_uuid, new_uuid]) => ({ old_uuid, new_uuid })) },
  });
  const remap = (...ids) => ({ operation: { remap: { moves: ids.map((id) => ({ workload_id: id })) } } });
  const moved = command(8000, 9500, remap("crossed"), [["20", "23"], ["21", "22"]]);
  const commands = [
    { ...moved, state: "FAILED", result: { applied_pairs: [{ old_uuid: "20", new_uuid: "22" }] } },
    moved,
    command(19000, 19500, remap("crossed"), [["22", "23"], ["23", "22"]]),
    command(59000, 61000, { workload_id: "crossed", operation: { restore: {} } },
      [["22", "21"], ["23", "20"]]),
    command(8000, 9500, remap("other", "swapped"),
      [["26", "25"], ["27", "24"], ["24", "27"], ["25", "26"]]),
    command(30000, 31000, remap("pair"), [["4", "7"], ["5", "6"]]),
    // A command of others has no pairs.
    { ...command(8000, undefined, remap("pair"), []), result: { claimed_gpu_uuids: ["6", "7"] } },
  ];
  return jointsOf(spans, commands).map((one) => [
    one.workload, one.kind, one.from.gpu_uuid,
    one.to ? one.to.gpu_uuid : one.end === Infinity ? "now" : one.end,
    ...(one.isGuess ? ["guess"] : [])].join(" "));
}"""


@pytest.mark.long
def test_joints_lead_from_where_a_workload_was_to_where_it_is(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(JOINTS) == [
            "moved move 0 3",
            "parked parked 1 2",
            "parked parked 2 now",
            "pair move 4 6 guess",
            "pair move 5 7 guess",
            "short parked 9 10",  # suspended and restored within 0.3 s
            "half move 12 10 guess",  # or 11 to 10, and 12 to 11
            "crossed move 20 23",
            "crossed move 21 22",
            "crossed move 22 23",
            "crossed move 23 22",
            "crossed parked 22 21",
            "crossed parked 23 20",
            "swapped move 24 27",
            "swapped move 25 26",
            "stopped parked 28 60500",
            "inside parked 30 90000",
            "inside parked 31 90000",
            "back parked 32 33",
            "short park parked 34 35",
            "short park move 35 36",
            "outage parked 37 38",
        ]
