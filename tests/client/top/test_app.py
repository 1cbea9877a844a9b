"""The page with a scripted coordinator: what it shows, and what each key does."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import pytest
from leasehold.v1 import (
    access_service_pb2,
    command_pb2,
    command_service_pb2,
    errors_pb2,
    fleet_service_pb2,
    plan_pb2,
    workload_pb2,
    workload_service_pb2,
)
from leasehold.v1.lease_pb2 import SLOT_STATE_CORDONED, Cordon
from leasehold.v1.worker_pb2 import WORKER_STATE_LOST
from leasehold_client.top import dialogs, fleet_feed
from leasehold_client.top.key_help import HELP
from leasehold_client.top.row_list import RowList
from leasehold_client.top.summary_text import counts_text
from leasehold_coordinator.lists import list_fields
from textual.widgets import Input

from tests.client.scripted_coordinator import ScriptedCoordinator, refuse

from .scripted_fleet import (
    LEASED,
    NOW,
    Page,
    ScriptedFleet,
    command,
    gpu,
    opened,
    parked,
    worker,
    workload,
)


@pytest.fixture
def fleet(scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch) -> ScriptedFleet:
    """Two hosts with two GPUs each, a running and a parked workload."""
    monkeypatch.setattr(fleet_feed, "BEAT_S", 0.1)
    monkeypatch.setattr(fleet_feed, "REFUSED_S", 0.1)
    found = ScriptedFleet(scripted)
    found.fleet = [
        worker("alpha", pending_claimers=2),
        gpu(0, LEASED, "one"),
        gpu(1),
        worker("beta"),
        gpu(0, worker="beta"),
        gpu(1, worker="beta"),
    ]
    found.workloads = [workload("one", "GPU-alpha-0"), parked("two")]
    return found


def play(
    fleet: ScriptedFleet,
    steps: Callable[[Page], Awaitable[None]],
    width: int = 80,
    height: int = 24,
    wait: str = "live",
) -> None:
    """Opens the page, waits for the state of its connection, and plays steps of a user."""

    async def main() -> None:
        async with opened(fleet.scripted.address, width, height, wait) as page:
            await steps(page)

    asyncio.run(main())


@pytest.mark.parametrize(("width", "height"), [(80, 24), pytest.param(200, 60, marks=pytest.mark.long)])
def test_state_is_text_at_both_sizes(fleet: ScriptedFleet, width: int, height: int) -> None:
    fleet.commands = [command("c-1")]

    async def steps(page: Page) -> None:
        await page.shows("2 hosts | 4 GPUs: 3 free, 1 leased | 1 parked, 24.0 GiB | 2 waiting")
        await page.shows("alpha", "connected    #.", "# leased    one", "60.0/80 GiB", "97%", "71 C")
        await page.shows("P suspended    two", "24.0 GiB in host memory", "2 claims wait for GPUs")
        await page.shows("suspend    one", "RUNNING", "checkpoint", "Commands: 1 open")
        assert all(len(line) <= width for line in page.text().splitlines())
        assert page.text().splitlines()[-1].strip().startswith("s suspend r restore m move x stop")
        assert ("NVIDIA H100" in page.text()) == (width == 200)

    play(fleet, steps, width, height)


def test_a_new_command_is_in_sight_as_long_as_nobody_chose_another_one(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        for number in range(1, 10):
            begun = command(f"c-{number}", phase=f"phase-{number}")
            begun.create_time.seconds += number
            fleet.tell(begun)
            await page.shows(f"phase-{number}")
            begun.state = command_pb2.COMMAND_STATE_SUCCEEDED
            fleet.tell(begun)

    play(fleet, steps)


@pytest.mark.parametrize(
    ("operation", "shown"),
    [
        ("reset_gpu_health", "reset_gpu…"),
        ("delete_checkpoints", "delete_ch…"),
        ("release_hold", "release_h…"),
    ],
)
def test_a_long_name_of_an_operation_is_shortened(fleet: ScriptedFleet, operation: str, shown: str) -> None:
    async def steps(page: Page) -> None:
        one = command("c-1", phase="begun")
        getattr(one.operation, operation).SetInParent()
        fleet.tell(one)
        await page.shows(shown, "begun")

    play(fleet, steps)


def test_changes_are_shown(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        fleet.tell(command("c-1", phase="lock"))
        await page.shows("suspend    one", "lock")
        ended = command("c-1", state=command_pb2.COMMAND_STATE_FAILED)
        ended.error.message, ended.error.reason = "no memory: stop two", errors_pb2.ERROR_REASON_INTERRUPTED
        fleet.tell(ended)
        await page.shows("FAILED", "no memory: stop two", "Commands: 0 open")
        fleet.tell(gpu(1, LEASED, "three"))
        await page.shows("connected    ##", "# leased    three")

    play(fleet, steps, width=200)


def test_a_suspend_shows_its_plan_and_asks(fleet: ScriptedFleet) -> None:
    fleet.scripted.answers["SuspendWorkload"] = lambda request, context: (
        workload_service_pb2.SuspendWorkloadResponse(command=command("c-9", phase="hooks"))
    )

    async def steps(page: Page) -> None:
        await page.press("down", "s")
        await page.shows("suspend one", "1. the driver moves the memory", "y suspend   Esc leave as it is")
        await page.press("escape")
        await page.shows("order: name")
        assert not fleet.scripted.asked(workload_service_pb2.SuspendWorkloadRequest)
        await page.press("s")
        await page.shows("y suspend")
        await page.press("y")
        await page.shows("Commands: 1 open", "hooks")
        [asked] = fleet.scripted.asked(workload_service_pb2.SuspendWorkloadRequest)
        assert (asked.workload, bool(asked.request_id)) == ("id-of-one", True)
        result = command_pb2.CommandResult(already_there=True)
        fleet.tell(command("c-9", state=command_pb2.COMMAND_STATE_SUCCEEDED, result=result))
        await page.shows("suspend SUCCEEDED: nothing to do")

    play(fleet, steps)


def test_a_plan_with_refusals_can_not_be_confirmed(fleet: ScriptedFleet) -> None:
    refused = errors_pb2.Error(
        reason=errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY, message="GPU-x needs 9 GiB: stop [bold]b"
    )
    plan = workload_service_pb2.PlanResponse(plan=plan_pb2.Plan(refusals=[refused]))
    fleet.scripted.answers["Plan"] = lambda request, context: plan

    async def steps(page: Page) -> None:
        await page.press("down", "s")
        await page.shows("REFUSED: GPU-x needs 9 GiB: stop [bold]b (INSUFFICIENT_HOST_MEMORY)")
        assert "y suspend" not in page.text()
        await page.press("y")
        await page.shows("nothing was changed   Esc close")
        await page.press("escape")
        await page.shows("order: name")
        assert not fleet.scripted.asked(workload_service_pb2.SuspendWorkloadRequest)

    play(fleet, steps, width=120)


@pytest.mark.long
def test_a_refused_call_shows_its_message_and_reason(fleet: ScriptedFleet) -> None:
    fleet.scripted.answers["StopWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.FAILED_PRECONDITION, "WORKLOAD_BUSY", "one is busy: wait for c-1"
    )

    async def steps(page: Page) -> None:
        await page.press("down", "x")
        await page.shows("one is RUNNING. It gets SIGTERM, and SIGKILL after 10 s.")
        await page.press("y")
        await page.shows("one is busy: wait for c-1 (WORKLOAD_BUSY)", "Esc close")
        await page.press("escape")
        await page.shows("order: name")

    play(fleet, steps)


def test_an_effect_that_changes_is_shown_before_it_is_confirmed(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogs, "EFFECT_S", 3600.0)
    fleet.scripted.answers["StopWorkload"] = lambda request, context: (
        workload_service_pb2.StopWorkloadResponse(command=command("c-9", phase="terminate"))
    )

    async def steps(page: Page) -> None:
        await page.press("down", "x")
        await page.shows("one is RUNNING. It gets SIGTERM, and SIGKILL after 10 s.", "y stop")
        fleet.tell(parked("one"))
        await page.until(lambda: page.app.model.workloads.values["id-of-one"] == parked("one"))
        await page.press("y")
        await page.shows("one is SUSPENDED. Its processes are killed at once", "y stop")
        assert not fleet.scripted.asked(workload_service_pb2.StopWorkloadRequest)
        await page.press("y")
        await page.shows("Commands: 1 open")
        [asked] = fleet.scripted.asked(workload_service_pb2.StopWorkloadRequest)
        assert asked.workload == "id-of-one"

    play(fleet, steps)


def test_an_effect_stays_current_until_there_is_nothing_to_do(fleet: ScriptedFleet) -> None:
    fleet.commands = [command("c-1", "id-of-two", state=command_pb2.COMMAND_STATE_PENDING)]

    async def steps(page: Page) -> None:
        await page.press("down", "x")
        await page.shows("one is RUNNING. It gets SIGTERM")
        fleet.tell(workload("one", state=workload_pb2.WORKLOAD_STATE_WEDGED))
        await page.shows("one is WEDGED. Its processes are killed at once.")
        fleet.tell(workload("one", state=workload_pb2.WORKLOAD_STATE_EXITED))
        await page.shows("one has ended: there is nothing to stop", "Esc close")
        assert "y stop" not in page.text()
        await page.press("y", "escape", "tab", "k")
        await page.shows("The suspend of two was not sent to its worker: it ends at once.")
        fleet.tell(command("c-1", "id-of-two"))
        await page.shows("The suspend of two is rolled back once")
        fleet.tell(command("c-1", "id-of-two", state=command_pb2.COMMAND_STATE_SUCCEEDED))
        await page.shows("the suspend of two has ended: there is nothing to cancel", "Esc close")
        await page.press("y", "escape")
        await page.shows("order: name")
        for request in (workload_service_pb2.StopWorkloadRequest, command_service_pb2.CancelCommandRequest):
            assert not fleet.scripted.asked(request)

    play(fleet, steps)


def test_a_parked_workload_is_restored(fleet: ScriptedFleet) -> None:
    fleet.scripted.answers["RestoreWorkload"] = lambda request, context: (
        workload_service_pb2.RestoreWorkloadResponse(command=command("c-2", "id-of-two"))
    )

    async def steps(page: Page) -> None:
        await page.press("down", "down", "down", "r")
        await page.shows("y restore")
        await page.press("y")
        await page.shows("Commands: 1 open")
        [asked] = fleet.scripted.asked(workload_service_pb2.RestoreWorkloadRequest)
        assert (asked.workload, list(asked.operation.gpu_uuids)) == ("id-of-two", [])

    play(fleet, steps)


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "pairs"),
    [
        (["down", "m", "down", "enter"], {"id-of-one": [("GPU-alpha-0", "GPU-alpha-1")]}),
        (
            ["down", "m", "down", "down", "enter"],
            {
                "id-of-one": [("GPU-alpha-0", "GPU-alpha-2")],
                "id-of-three": [("GPU-alpha-2", "GPU-alpha-0")],
            },
        ),
    ],
    ids=["move", "swap"],
)
def test_a_move_takes_the_slot_that_is_chosen(
    fleet: ScriptedFleet, keys: list[str], pairs: dict[str, list[tuple[str, str]]]
) -> None:
    fleet.fleet.append(gpu(2, LEASED, "three"))
    fleet.workloads.append(workload("three", "GPU-alpha-2"))
    fleet.scripted.answers["RemapWorkloads"] = lambda request, context: (
        workload_service_pb2.RemapWorkloadsResponse(command=command("c-3"))
    )

    async def steps(page: Page) -> None:
        await page.press(*keys[:2])
        await page.shows("Move one from alpha/0: choose its slot with the arrows")
        await page.press(*keys[2:])
        await page.shows("y remap")
        await page.press("y")
        await page.shows("Commands: 1 open")
        [asked] = fleet.scripted.asked(workload_service_pb2.RemapWorkloadsRequest)
        moves = {
            move.workload_id: [(pair.old_uuid, pair.new_uuid) for pair in move.pairs]
            for move in asked.operation.moves
        }
        assert moves == pairs

    play(fleet, steps)


@pytest.mark.long
def test_moves_that_can_not_be_are_explained(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.press("down", "m", "down", "down", "down", "down", "down", "enter")
        await page.shows("one can't move from alpha/0 to beta/0: a running workload can't leave its worker")
        await page.press("home", "m")
        await page.shows("choose a GPU with a workload, or a parked workload, and press m again")
        await page.press("down", "m", "up", "enter")
        await page.shows("Move one from alpha/0")  # still waits for a slot
        await page.press("escape")
        await page.shows("order: name")
        await page.press("down", "m", "enter")
        await page.shows("one is on alpha/0 already")
        assert not fleet.scripted.asked(workload_service_pb2.PlanRequest)

    play(fleet, steps)


@pytest.mark.long
def test_a_dialog_can_be_closed_before_the_answer(fleet: ScriptedFleet) -> None:
    is_over = threading.Event()

    def answer_late(request: Any, context: grpc.ServicerContext) -> workload_service_pb2.StopWorkloadResponse:
        is_over.wait(60)
        return workload_service_pb2.StopWorkloadResponse(command=command("c-9"))

    fleet.scripted.answers["StopWorkload"] = answer_late

    async def steps(page: Page) -> None:
        await page.press("down", "x")
        await page.shows("y stop")
        await page.press("y")
        await page.shows("asking the coordinator", "Esc close: the command may be stored")
        await page.press("escape")
        await page.shows("closed before the answer. The command may have been stored")
        assert "asking the coordinator" not in page.text()

    try:
        play(fleet, steps, width=120)
    finally:
        is_over.set()


@pytest.mark.long
def test_a_reason_that_is_empty_or_too_long_is_refused(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.press("c")
        await page.shows("cordon alpha", "Enter continue")
        await page.press("enter")
        await page.shows("the reason is empty: give one", "Esc leave as it is")
        await page.type("x" * 257)
        await page.press("enter")
        await page.shows("the reason has 257 characters: give at most 256")
        await page.press("backspace", "enter")
        await page.shows("worker alpha accepts no new work:", "y cordon")

    play(fleet, steps)


@pytest.mark.long
def test_a_host_is_cordoned_with_a_reason_and_uncordoned(fleet: ScriptedFleet) -> None:
    fleet.scripted.answers["Cordon"] = lambda request, context: fleet_service_pb2.CordonResponse(
        command=command("c-4", "")
    )
    fleet.scripted.answers["Uncordon"] = lambda request, context: fleet_service_pb2.UncordonResponse(
        command=command("c-5", "")
    )

    async def steps(page: Page) -> None:
        await page.press("c")
        await page.shows("cordon alpha", "Enter continue")
        await page.type("fan [red]sq")
        await page.press("enter")
        await page.shows("worker alpha accepts no new work: fan [red]sq. Leases stay.")
        await page.press("y")
        await page.until(lambda: bool(fleet.scripted.asked(fleet_service_pb2.CordonRequest)))
        [asked] = fleet.scripted.asked(fleet_service_pb2.CordonRequest)
        assert (asked.operation.reason, asked.operation.cordoned_by) == ("fan [red]sq", "eve@here")
        fleet.tell(worker("alpha", cordon=Cordon(reason="fan", cordoned_by="eve@here")))
        await page.shows("cordoned by eve@here: fan")
        await page.press("c")
        await page.shows("worker alpha accepts work again")
        await page.press("y")
        await page.until(lambda: bool(fleet.scripted.asked(fleet_service_pb2.UncordonRequest)))
        own = gpu(0)
        own.lease.cordon.reason = "fan"
        fleet.tell(own)
        await page.shows("cordoned: fan")
        await page.press("down", "c")
        await page.shows("alpha/0 loses its own cordon. Its worker stays cordoned")

    play(fleet, steps, width=120)


def test_a_free_gpu_of_a_cordoned_host_has_no_cordon_of_its_own(fleet: ScriptedFleet) -> None:
    hosts = Cordon(reason="fan", cordoned_by="eve@here", cordon_time=NOW)
    fleet.fleet = [
        worker("alpha", cordon=hosts),
        gpu(0, SLOT_STATE_CORDONED, cordon=hosts),  # as the coordinator shows a free one
        gpu(1, SLOT_STATE_CORDONED, cordon=Cordon(reason="Xid", cordoned_by="eve@here", cordon_time=NOW)),
    ]

    async def steps(page: Page) -> None:
        await page.press("down", "c")
        await page.shows("cordon alpha/0", "Enter continue")
        await page.press("escape", "down", "c")
        await page.shows("alpha/1 loses its own cordon. Its worker stays cordoned")

    play(fleet, steps, width=120)


def test_a_second_enter_closes_no_other_screen(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.press("c")
        await page.shows("cordon alpha", "Enter continue")
        await page.type("fan")
        entry = page.app.screen.query_one(Input)
        for _ in range(3):
            await entry.action_submit()  # as keys that come before the dialog has gone
        await page.shows("worker alpha accepts no new work: fan. Leases stay.")
        await page.press("escape")
        await page.until(lambda: len(page.app.screen_stack) == 1)

    play(fleet, steps)


def test_keys_act_on_the_list_that_has_the_focus(fleet: ScriptedFleet) -> None:
    fleet.commands = [command("c-1", "id-of-two")]

    async def steps(page: Page) -> None:
        await page.press("down", "tab")
        for key in ("s", "r", "x", "m"):
            await page.press(key)
            await page.shows(f"press Tab, choose a workload, and press {key} again")
        await page.press("c")
        await page.shows("press Tab, choose a host or a GPU, and press c again")
        await page.press("tab", "x")
        await page.shows("stop one", "one is RUNNING", "y stop")

    play(fleet, steps)


@pytest.mark.long
def test_a_command_is_cancelled_from_its_row_and_from_its_workload(fleet: ScriptedFleet) -> None:
    fleet.commands = [command("c-1")]
    fleet.scripted.answers["CancelCommand"] = lambda request, context: (
        command_service_pb2.CancelCommandResponse(command=command("c-1"))
    )

    async def steps(page: Page) -> None:
        await page.press("k")
        await page.shows("choose an open command with Tab and the arrows")
        for keys in (["tab", "k"], ["tab", "home", "down", "k"]):
            await page.press(*keys)
            await page.shows("The suspend of one is rolled back once")
            await page.press("y")
            await page.shows("order: name")
        assert len(fleet.scripted.asked(command_service_pb2.CancelCommandRequest)) == 2

    play(fleet, steps)


@pytest.mark.long
def test_a_role_that_permits_too_little_is_told(fleet: ScriptedFleet) -> None:
    fleet.role = access_service_pb2.ROLE_VIEWER

    async def steps(page: Page) -> None:
        await page.press("down")
        for key, verb in (("s", "suspend"), ("m", "remap"), ("x", "stop")):
            await page.press(key)
            await page.shows(f"{verb} needs the role user, and user/eve has the role viewer: ask an admin")
        await page.press("c")
        await page.shows("cordon needs the role operator")
        assert not fleet.scripted.asked(workload_service_pb2.PlanRequest)

    play(fleet, steps, width=150)


def test_a_login_without_a_role_sees_that_and_no_empty_fleet(fleet: ScriptedFleet) -> None:
    def refused(request: Any, context: grpc.ServicerContext) -> None:
        refuse(context, grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED", "user/eve has no role")

    fleet.role = access_service_pb2.ROLE_UNSPECIFIED
    watches = ("WatchFleet", "WatchWorkloads", "WatchCommands")
    permitted = {name: fleet.scripted.answers[name] for name in watches}
    fleet.scripted.answers |= dict.fromkeys(watches, refused)

    async def steps(page: Page) -> None:
        await page.shows("REFUSED: user/eve has no role", "user/eve (no role)")
        await page.shows("the fleet is not shown: the first line says why", "not shown")
        for false in ("0 hosts", "0 GPUs", "reading the fleet", "0 open", "no open command"):
            assert false not in page.text()
        fleet.scripted.answers |= permitted
        await page.shows("2 hosts", "# leased    one", "Commands: 0 open", "no open command")

    play(fleet, steps, width=150, wait="REFUSED")


@pytest.mark.long
def test_details_of_every_row(fleet: ScriptedFleet) -> None:
    fleet.commands = [command("c-1", actor="user/eve")]

    async def steps(page: Page) -> None:
        found = ["host alpha", "GPU alpha/0", "GPU alpha/1", "workload two", "waiting claims of alpha"]
        for title in found:
            await page.press("enter")
            await page.shows(title, "Esc close")
            await page.press("down", "escape", "down")
        await page.press("home", "enter")
        await page.shows("state   CONNECTED")
        assert "last seen" not in page.text()
        fleet.tell(worker("alpha", state=WORKER_STATE_LOST))
        await page.shows("LOST, last seen")
        await page.press("escape", "tab", "enter")
        await page.shows("suspend of one", "user/eve", "c-1")

    play(fleet, steps, height=40)


@pytest.mark.long
def test_filters_of_words_and_of_expressions(fleet: ScriptedFleet) -> None:
    def names(page: Page) -> list[str]:
        return [row.key for row in page.app.query_one("#fleet", RowList).rows]

    async def steps(page: Page) -> None:
        await page.press("slash")
        await page.type("BETA free")
        await page.press("enter")
        await page.until(lambda: names(page) == ["host w-beta", "gpu GPU-beta-0", "gpu GPU-beta-1"])
        await page.press("slash")
        await page.type("state = FREE")
        await page.press("enter")
        await page.until(lambda: "gpu GPU-alpha-1" in names(page) and "gpu GPU-alpha-0" not in names(page))
        await page.press("slash")
        await page.type("nope = 3")
        await page.press("enter")
        await page.shows("no field is named 'nope'")
        await page.press("home", "k")
        await page.shows("choose an open command")  # a refused filter hides no later message
        await page.press("escape")
        await page.shows("no field is named 'nope'")
        await page.press("slash", "delete", "enter")
        await page.until(lambda: len(names(page)) == 8)

    play(fleet, steps)


def test_a_refused_filter_leaves_lines_to_the_fleet_and_ends_with_escape(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        page.app._filter_by("nope = 3")
        await page.shows("no field is named 'nope'")
        assert page.app.query_one("#note").size.height <= 2
        await page.press("slash", "escape")  # leaves the input only
        await page.shows("no field is named 'nope'")
        await page.press("escape")
        await page.shows("order: name")
        assert "nope" not in page.text()

    play(fleet, steps, width=40, height=12)


def test_a_narrow_terminal_shows_the_keys_of_help_and_quit(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.shows("? help q quit s suspend")
        await page.pilot.resize_terminal(120, 24)
        await page.shows("s suspend r restore m move x stop c cordon k cancel / filter ? help q quit")

    play(fleet, steps, width=40)


def test_a_refused_filter_names_the_fields_of_both_kinds(fleet: ScriptedFleet) -> None:
    fields = {
        "WatchFleet": sorted({*list_fields.WORKERS, *list_fields.GPUS}),
        "WatchWorkloads": sorted(list_fields.WORKLOADS),
    }
    texts = {
        name: f"invalid filter at character 1: no field is named 'nope': use one of {', '.join(known)}"
        for name, known in fields.items()
    }
    for name, text in texts.items():
        permitted = fleet.scripted.answers[name]

        def answer(request: Any, context: Any, text: str = text, permitted: Any = permitted) -> Any:
            if request.filter:
                message = "'(' is not closed" if "(" in request.filter else text
                refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", message)
            return permitted(request, context)

        fleet.scripted.answers[name] = answer

    async def steps(page: Page) -> None:
        page.app._filter_by("nope = 3")
        await page.shows(f"hosts and GPUs: {texts['WatchFleet']}; workloads: {texts['WatchWorkloads']}")
        page.app._filter_by("nope = (")
        await page.shows("'(' is not closed")
        assert "hosts and GPUs" not in page.text()

    play(fleet, steps)


@pytest.mark.long
def test_hosts_are_sorted_closed_and_paused(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.press("o")
        await page.shows("order: most free GPUs")
        await page.until(lambda: page.text().index("beta") < page.text().index("alpha"))
        await page.press("home", "left")
        await page.shows("+ beta")
        await page.press("right")
        await page.shows("- beta")
        await page.press("p")
        await page.shows("PAUSED: press p to go on")
        fleet.tell(gpu(1, LEASED, "three"))
        await page.until(lambda: page.app.model.gpus.values["GPU-alpha-1"].workload_name == "three")
        await asyncio.sleep(0.3)
        assert "three" not in page.text()
        await page.press("p")
        await page.shows("three")
        await page.press("question_mark")
        await page.shows("unhealthy", *filter(None, map(str.strip, HELP)))

    play(fleet, steps, height=50)


def test_a_move_has_all_slots_although_a_filter_hides_them(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.press("slash", *"one", "enter")
        await page.until(lambda: "beta" not in page.text())
        await page.press("down", "m")
        await page.shows("Move one from alpha/0", "beta")
        await page.press("escape")
        await page.until(lambda: "beta" not in page.text())

    play(fleet, steps)


def test_a_coordinator_that_is_away_is_told_and_caught_up_with(
    fleet: ScriptedFleet, short_outages: None
) -> None:
    async def steps(page: Page) -> None:
        fleet.away()
        await page.shows("COORDINATOR AWAY", "this is the last known state", "# leased    one")
        assert "no coordinator answers at" in page.part("connection")
        fleet.fleet = [worker("alpha"), gpu(0), gpu(1)]
        fleet.workloads = []
        fleet.is_away = False
        await page.shows("live", "1 host | 2 GPUs: 2 free", "connected    ..")
        assert "beta" not in page.text()

    play(fleet, steps)


def test_the_outcome_of_a_command_that_ended_during_an_outage_is_told(
    fleet: ScriptedFleet, short_outages: None
) -> None:
    result = command_pb2.CommandResult(already_there=True)
    ended = command("c-9", state=command_pb2.COMMAND_STATE_SUCCEEDED, result=result)
    fleet.scripted.answers |= {
        "SuspendWorkload": lambda request, context: workload_service_pb2.SuspendWorkloadResponse(
            command=command("c-9", phase="hooks")
        ),
        "GetCommand": lambda request, context: command_service_pb2.GetCommandResponse(command=ended),
    }

    async def steps(page: Page) -> None:
        await page.press("down", "s")
        await page.shows("y suspend")
        await page.press("y")
        await page.shows("Commands: 1 open", "hooks")
        fleet.away()
        await page.shows("COORDINATOR AWAY")
        fleet.is_away = False
        await page.shows("live", "suspend SUCCEEDED: nothing to do", "Commands: 0 open")

    play(fleet, steps)


def test_details_say_that_their_row_has_left_the_list(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.press("down", "down", "down", "enter")
        await page.shows("two", "Esc close")
        assert "The row has left the list" not in page.text()
        fleet.tell(workload("two", state=workload_pb2.WORKLOAD_STATE_EXITED))
        await page.shows("The row has left the list. Its last state there:", "SUSPENDED")

    play(fleet, steps)


def test_a_filter_without_answer_says_so(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        answer, fleet.scripted.answers["WatchFleet"] = fleet.scripted.answers["WatchFleet"], _nobody
        await page.press("slash")
        await page.type("state = FREE")
        await page.press("enter")
        await page.shows("the coordinator has not answered the filter yet", "filter: state = FREE")
        fleet.scripted.answers["WatchFleet"] = answer
        await page.shows("0 . free")
        assert "has not answered" not in page.text()

    play(fleet, steps)


def _nobody(request: object, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNAVAILABLE, "nobody listens")


def test_a_token_that_is_too_old_leads_to_a_new_snapshot(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        before = fleet.snapshots
        fleet.workloads = [workload("one", "GPU-alpha-0"), parked("three")]
        fleet.tell(None)
        await page.until(lambda: fleet.snapshots >= before + 3)
        await page.shows("live", "P suspended    three")
        assert "two" not in page.text()

    play(fleet, steps)


def test_text_of_peers_is_neither_markup_nor_control(fleet: ScriptedFleet) -> None:
    name = "[red]x[/]\x1b[31m\u202e"
    fleet.fleet[1] = gpu(0, LEASED, name)
    fleet.workloads[0] = workload(name, "GPU-alpha-0")
    fleet.fleet[3] = worker("be[b]ta\n\x07")

    async def steps(page: Page) -> None:
        await page.shows(r"[red]x[/]\x1b[31m\u202e", r"be[b]ta\n\x07")
        await page.press("down", "x")
        await page.shows(r"stop [red]x[/]\x1b[31m\u202e")
        await page.press("escape", "enter")
        await page.shows(r"workload [red]x[/]\x1b[31m\u202e")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", page.text())

    play(fleet, steps, width=150, height=40)


@pytest.mark.long
def test_a_thousand_hosts_stay_responsive(fleet: ScriptedFleet) -> None:
    names = [f"host-{number:04}" for number in range(1000)]
    fleet.fleet = []
    for name in names:
        fleet.fleet += [worker(name, gpus=8), *(gpu(slot, worker=name) for slot in range(8))]
    fleet.workloads = []

    async def steps(page: Page) -> None:
        await page.shows("1000 hosts | 8000 GPUs: 8000 free", "+ host-0000")
        rendered = 0
        render_line = RowList.render_line

        def counted(self: RowList, y: int) -> Any:
            nonlocal rendered
            rendered += 1
            return render_line(self, y)

        RowList.render_line = counted  # type: ignore[method-assign]
        try:
            await page.press("end")
            await page.shows("host-0999")
            fleet.tell(gpu(0, LEASED, "late", worker="host-0999"))
            await page.shows("#.......")
            await page.press("right")
            await page.shows("- host-0999")
            await page.press("down")
            await page.shows("# leased    late")
        finally:
            RowList.render_line = render_line  # type: ignore[method-assign]
        assert rendered < 5000  # a few screens, and not the fleet

    play(fleet, steps)


def test_a_change_while_the_page_ends_is_no_defect(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.shows("4 GPUs: 3 free")
        await page.app.query_one("#counts").remove()  # as textual does first at the end
        fleet.tell(gpu(1, LEASED, "one"))
        await page.until(lambda: "2 free" in counts_text(page.app.model))
        page.app._update_rows()  # as the timer does
        assert page.app.failure is None

    play(fleet, steps)


def test_quitting_keys(fleet: ScriptedFleet) -> None:
    async def steps(page: Page) -> None:
        await page.press("ctrl+c")
        await page.until(lambda: not page.app.is_running)

    play(fleet, steps)
