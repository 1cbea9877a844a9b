"""What NVML must show after a suspend, besides the list of processes."""

import errno
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import trio
from leasehold_worker.driver.members import RUNNING, Member, are_unlisted, needed_by_gpu
from leasehold_worker.driver.verification import Before, Verification, freed_usage, not_freed, sized
from leasehold_worker.gpus.inventory import GpuUsage
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity

GIB = 2**30
MEMBER = Member(ProcessIdentity(Pid(10), 1), RUNNING, {"a": 8 * GIB})


def before(**usage: GpuUsage) -> Before:
    return Before([MEMBER], {10, 11}, usage)


def test_memory_that_fell_is_free() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    assert not_freed(then, {"a": GpuUsage(GIB, {})}) == []


def test_a_process_that_is_still_listed_is_not_parked() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    assert "lists its process 10" in not_freed(then, {"a": GpuUsage(GIB, {10: None})})[0].message
    assert "lists its process 11" in not_freed(then, {"a": GpuUsage(GIB, {11: GIB})})[0].message


def test_memory_that_nobody_owns_up_to_is_not_free() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    (error,) = not_freed(then, {"a": GpuUsage(9 * GIB, {})})
    assert "8 GiB as suspended, but a has 9 GiB in use" in error.message
    assert error.metadata == {"gpu_uuid": "a"}


def test_memory_that_somebody_else_took_meanwhile_is_no_proof_against_it() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    assert not_freed(then, {"a": GpuUsage(9 * GIB, {99: 8 * GIB})}) == []


def test_what_nvml_can_not_say_is_not_held_against_it() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    for now in (GpuUsage(None, {}), GpuUsage(9 * GIB, {99: None})):
        assert not_freed(then, {"a": now}) == []
    elsewhere = Before([OTHER], {10, 11}, {})
    assert not_freed(elsewhere, {}) == [], "NVML has never listed it"


def test_a_gpu_that_nvml_no_longer_reads_is_not_free() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    for member in (MEMBER, replace(OTHER, gpu_uuids=("a",))):
        (error,) = not_freed(replace(then, members=[member]), {"b": GpuUsage(GIB, {})})
        assert "can't list the processes of a " in error.message
        assert error.metadata == {"gpu_uuid": "a"}


def test_without_an_answer_any_gpu_may_be_occupied() -> None:
    class Blind:
        """An inventory that no thread can ask."""

        chips: ClassVar = {"a": None, "b": None}

        def usage(self) -> NoReturn:
            raise OSError(errno.EAGAIN, "no thread can be started")

    inventory: Any = Blind()
    verification = Verification(inventory, timeout_s=0)
    found = trio.run(verification.occupancy, [MEMBER])
    assert (found.listed, found.unread) == (set(), {"a", "b"})


OTHER = Member(ProcessIdentity(Pid(11), 1), RUNNING)


def test_memory_that_nobody_accounts_for_counts_as_that_of_a_member() -> None:
    usage = {"a": GpuUsage(9 * GIB, {10: None, 99: GIB}), "b": GpuUsage(GIB, {})}
    (member,) = sized([MEMBER], usage, ["a", "b"])
    assert (member.device_memory_bytes, member.gpu_uuids) == ({"a": 8 * GIB}, ("a",))
    (member,) = sized([MEMBER], {"a": GpuUsage(None, {10: None})}, ["a"])
    assert (member.device_memory_bytes, member.gpu_uuids) == ({}, ("a",)), "unknown, and not zero"


def test_members_that_nvml_does_not_list_have_what_is_in_use_on_the_gpus_of_their_workload() -> None:
    usage = {"a": GpuUsage(9 * GIB, {}), "b": GpuUsage(GIB, {})}
    found = sized([MEMBER, OTHER], usage, ["a"])
    assert [(each.total_bytes, each.gpu_uuids) for each in found] == [(9 * GIB, ()), (0, ())]
    assert needed_by_gpu(found, ["a"]) == {"a": 9 * GIB}
    assert needed_by_gpu(sized([MEMBER], {"a": GpuUsage(None, {})}, ["a"]), ["a"]) == {}


def test_a_member_without_a_context_needs_nothing_where_nvml_lists_the_others() -> None:
    found = sized([MEMBER, OTHER], {"a": GpuUsage(9 * GIB, {10: 8 * GIB})}, ["a", "b"])
    assert needed_by_gpu(found, ["a", "b"]) == {"a": 8 * GIB, "b": 0}
    assert not are_unlisted(found)


def test_what_was_freed_is_what_parked_members_had() -> None:
    then = {"a": GpuUsage(9 * GIB, {10: None})}
    assert freed_usage({10}, then, {"a": GpuUsage(GIB, {})}) == {"a": GpuUsage(8 * GIB, {10: None})}
    for now in (GpuUsage(8 * GIB, {}), GpuUsage(GIB, {99: GIB}), GpuUsage(None, {})):
        assert freed_usage({10}, then, {"a": now}) == then
