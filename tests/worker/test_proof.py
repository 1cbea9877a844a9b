"""What NVML must show after a suspend, besides the list of processes."""

from leasehold_worker.checkpoint.members import RUNNING, Member
from leasehold_worker.inventory import GpuUsage
from leasehold_worker.processes import Pid, ProcessIdentity
from leasehold_worker.proof import Before, not_freed

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
    assert "8 GiB were parked, but a has 9 GiB in use" in error.message
    assert error.metadata == {"gpu_uuid": "a"}


def test_memory_that_somebody_else_took_meanwhile_is_no_proof_against_it() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    assert not_freed(then, {"a": GpuUsage(9 * GIB, {99: 8 * GIB})}) == []


def test_what_nvml_can_not_say_is_not_held_against_it() -> None:
    then = before(a=GpuUsage(9 * GIB, {10: 8 * GIB}))
    for now in (GpuUsage(None, {}), GpuUsage(9 * GIB, {99: None})):
        assert not_freed(then, {"a": now}) == []
    assert not_freed(then, {}) == []
