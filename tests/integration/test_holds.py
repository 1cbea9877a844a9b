"""Holds from end to end: `suspend --hold-for`, a waiting `exec`, and those who take the hold or may not."""

import os
import signal
import sys

import pytest
from leasehold.v1.lease_pb2 import SLOT_STATE_FREE, SLOT_STATE_RESERVED

from .fleets import COUNTER, Fleet
from .local_hosts import LocalHost

COUNTING = ("--", sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02")


def reserved(fleet: Fleet) -> int:
    return sum(gpu.lease.state == SLOT_STATE_RESERVED for gpu in fleet.client.gpus())


@pytest.mark.long
def test_the_caller_of_a_suspend_gets_the_gpus_before_who_waits(fleet: Fleet, alpha: LocalHost) -> None:
    fleet.run_counter("old", gpus=4)
    waiting = alpha.exec("--name", "waiter", "--", "sh", "-c", "echo holding; exec sleep 1000")
    alpha.wait_line(waiting, "waiting", "err")
    text = fleet.cli("suspend", "old", "--hold-for", "2m").stdout
    hold_id = text.partition("  hold ")[2].split()[0]
    assert f"hold {hold_id} for 120 s: take it by run --hold or restore --hold" in text
    fleet.wait(lambda: reserved(fleet) == 4)
    rows = fleet.cli("get", "gpus").stdout.splitlines()[1:]
    assert len(rows) == 4
    assert all("reserved" in row and f"hold {hold_id}" in row and "held by " in row for row in rows)
    assert alpha.look().gpus[0].hold.hold_id == hold_id
    fleet.refuse("run", "--gpus", "1", *COUNTING, code=1, match="NO_FREE_GPU")
    fleet.refuse("run", "--gpus", "1", "--hold", "c-nobody", *COUNTING, code=1, match="UNKNOWN_HOLD")
    fleet.cli("run", "--name", "new", "--gpus", "3", "--hold", hold_id, *COUNTING)
    fleet.wait_counting("new")
    alpha.wait_line(waiting, "holding")  # on the GPU that was left
    fleet.wait(lambda: sorted(fleet.leases().values()) == ["new", "new", "new", "waiter"])
    fleet.refuse("run", "--gpus", "1", "--hold", hold_id, *COUNTING, code=1, match="UNKNOWN_HOLD")


@pytest.mark.long
def test_a_hold_is_taken_at_once_and_by_a_restore_too(fleet: Fleet) -> None:
    """No load of the worker needs to have shown the hold."""
    fleet.run_counter("old", gpus=4)
    for _ in range(3):
        parked = fleet.client.wait(fleet.client.suspend("old", hold_for_s=60, held_by="ann"))
        fleet.client.wait(fleet.client.restore("old", hold_id=parked.result.hold_id))
    fleet.wait_counting("old")
    parked = fleet.client.wait(fleet.client.suspend("old", hold_for_s=60))
    plan = fleet.client.plan_restore("old", hold_id=parked.result.hold_id)
    assert not plan.refusals
    assert [refusal.metadata["field"] for refusal in fleet.client.plan_restore("old", hold_id="x").refusals]
    assert fleet.client.plan_restore("old").refusals
    fleet.cli("release", "--hold", parked.result.hold_id)
    fleet.wait(lambda: all(gpu.lease.state == SLOT_STATE_FREE for gpu in fleet.client.gpus()))
    fleet.refuse("release", "--hold", parked.result.hold_id, code=1, match="UNKNOWN_HOLD")
    fleet.refuse("release", "--hold", "c-nobody", code=1, match="UNKNOWN_HOLD")
    fleet.refuse("suspend", "old", "--hold-for", "11m", code=2, match="10m")


def test_a_run_and_a_restore_preempt(fleet: Fleet, alpha: LocalHost) -> None:
    fleet.run_counter("one", gpus=2)
    fleet.run_counter("two", gpus=2)
    waiting = alpha.exec("--name", "waiter", "--gpus", "4", "--", "sh", "-c", "echo holding; exec sleep 1000")
    alpha.wait_line(waiting, "waiting", "err")
    text = fleet.cli("run", "--name", "big", "--gpus", "4", "--preempt", "one,two", *COUNTING).stdout
    assert "  suspended one, two" in text
    (command,) = fleet.client.commands(filter='workload = "big"', limit=1)
    for name in ("one", "two"):
        events = fleet.cli("events", name).stdout
        assert f"workload {name} is SUSPENDED, by command {command.command_id}" in events
    fleet.wait_counting("big")
    fleet.wait(lambda: fleet.leases() == {f"alpha/{slot}": "big" for slot in range(4)})
    fleet.refuse("restore", "one", "--preempt", "nobody", code=1, match="UNKNOWN_WORKLOAD")
    fleet.refuse("restore", "one", "--preempt", "one", code=2, match="can't preempt itself")
    fleet.refuse("restore", "one", "--preempt", "big,big", code=2, match="named twice")
    fleet.cli("restore", "one", "--preempt", "big")
    fleet.wait_counting("one")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "one", "alpha/1": "one"})
    wrong = ("run", "--name", "wrong", "--gpus", "2", "--preempt", "one", "--", "/no/such/program")
    done = fleet.cli(*wrong, code=1)
    assert "SPAWN_FAILED" in done.stderr
    assert "was suspended, and restored after the failure" in done.stderr
    fleet.wait_counting("one")
    assert fleet.leases() == {"alpha/0": "one", "alpha/1": "one"}


def test_no_helper_is_suspended_for_a_restore_that_is_refused_anyway(fleet: Fleet) -> None:
    fleet.run_counter("one", gpus=4)
    fleet.cli("suspend", "one")
    terms = ("--gpus", "4", "--helper", "suspend", "--yield-grace", "0s")
    fleet.cli("run", "--name", "helper", *terms, *COUNTING)
    fleet.wait_counting("helper")
    pid = fleet.client.workload("one").status.members[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        fleet.refuse("restore", "one", code=1, match="stopped by a signal.*TARGET_NOT_RUNNABLE")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "SUSPENDED" not in fleet.cli("events", "helper").stdout
    fleet.cli("restore", "one")
    fleet.wait_counting("one")
    assert "SUSPENDED" in fleet.cli("events", "helper").stdout
