"""The order of those who wait, and what is kept for them."""

from datetime import UTC, datetime

from leasehold_worker.leasing.claim_queue import ClaimQueue, Kept, Waiter, kept_with
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.leasing.host_reservations import HostRequest

ONE = GpuRequest(1)


def add(
    queue: ClaimQueue[str],
    name: str,
    priority: int = 0,
    *,
    helper: bool = False,
    request: GpuRequest = ONE,
) -> Waiter[str]:
    return queue.add(
        name,
        request,
        priority=priority,
        helper=helper,
        host=HostRequest(cpu_millicores=1),
        has_host=lambda _: True,
        take_host=lambda _: True,
        since=datetime.now(UTC),
    )


def names(waiters: ClaimQueue[str] | list[Waiter[str]]) -> list[str]:
    return [waiter.workload_id for waiter in waiters]


def test_equals_wait_in_the_order_in_which_they_came() -> None:
    queue = ClaimQueue[str]()
    for name in "abc":
        add(queue, name)
    assert names(queue) == ["a", "b", "c"]


def test_the_higher_priority_goes_first_and_helpers_last() -> None:
    queue = ClaimQueue[str]()
    for name, priority, helper in (
        ("low", -1, False),
        ("eager helper", 9, True),
        ("none", 0, False),
        ("high", 5, False),
        ("helper", 0, True),
        ("high too", 5, False),
    ):
        add(queue, name, priority, helper=helper)
    assert names(queue) == ["high", "high too", "none", "low", "eager helper", "helper"]
    assert len(queue) == 6
    assert queue.pending_claimers == 4


def test_who_is_taken_out_leaves_the_others_in_their_order() -> None:
    queue = ClaimQueue[str]()
    waiters = [add(queue, name) for name in "abc"]
    queue.remove(waiters[1])
    add(queue, "b")
    assert names(queue) == ["a", "c", "b"], "who comes again waits behind"
    assert queue.pending_claimers == 3


def test_waiters_may_be_taken_out_while_it_is_gone_through() -> None:
    queue = ClaimQueue[str]()
    for name in "abc":
        add(queue, name)
    seen = []
    for waiter in queue:
        seen.append(waiter.workload_id)
        queue.remove(waiter)
    assert seen == ["a", "b", "c"]
    assert not len(queue)


def test_ahead_of_a_new_claim_are_its_equals_and_those_above() -> None:
    queue = ClaimQueue[str]()
    for name, priority in (("low", 0), ("equal", 1), ("high", 2)):
        add(queue, name, priority)
    add(queue, "helper", 9, helper=True)
    assert names(queue.ahead_of(1, helper=False)) == ["high", "equal"]
    assert names(queue.ahead_of(-1, helper=False)) == ["high", "equal", "low"]
    assert names(queue.ahead_of(9, helper=True)) == ["high", "equal", "low", "helper"]
    assert names(queue.ahead_of(10, helper=True)) == ["high", "equal", "low"]


def test_what_is_kept_is_no_more_than_those_who_wait_may_need() -> None:
    queue = ClaimQueue[str]()
    add(queue, "lacks GPUs", request=GpuRequest(2, name="A"))
    add(queue, "lacks the host", request=GpuRequest(1, name="B"))
    add(queue, "behind", request=GpuRequest(1, name="B"))
    add(queue, "never", request=GpuRequest(8))
    usable = {"A": frozenset("01"), "B": frozenset("2345")}

    def obtainable(request: GpuRequest) -> frozenset[str]:
        return usable.get(request.name, frozenset())

    def choose(request: GpuRequest, taken: frozenset[str]) -> tuple[str, ...] | None:
        free = sorted(obtainable(request) - taken - {"0"})
        return tuple(free[: request.count]) if len(free) >= request.count else None

    kept = Kept()
    for waiter in queue:
        request = waiter.request
        kept = kept_with(kept, waiter, choose(request, kept.gpu_uuids), obtainable(request))
    assert kept == Kept(frozenset("0123"), HostRequest(cpu_millicores=3))
