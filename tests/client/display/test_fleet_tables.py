"""Tables of workers, GPUs and workloads."""

import pytest
from leasehold.v1 import gpu_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease
from leasehold.v1.worker_pb2 import FleetGpu, MachineResources, Worker
from leasehold_client.display.fleet_tables import echo_gpus, echo_workers, echo_workloads, gpu_reason

from tests.client.scripted_coordinator import GPUS, workload

CORDON = Cordon(reason="fan is\nloud", cordoned_by="ann@host")


def columns(output: str) -> list[list[str]]:
    """The cells of each line, which two blanks part."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]


def test_a_cordoned_worker_says_why_and_what_of_its_host_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    machine = MachineResources(
        cpu_millicores_total=8000,
        cpu_millicores_free=2500,
        memory_total_bytes=16 * 2**30,
        memory_free_bytes=3 * 2**29,
    )
    echo_workers(
        [
            Worker(name="alpha", state=worker_pb2.WORKER_STATE_CONNECTED, cordon=CORDON, resources=machine),
            Worker(name="beta", state=worker_pb2.WORKER_STATE_LOST),
        ]
    )
    headings, alpha, beta = columns(capsys.readouterr().out)
    assert headings[5:7] == ["CPU", "MEMORY"]
    assert alpha[:2] == ["alpha", "CONNECTED,cordoned"]
    assert alpha[5:7] == ["2.5/8", "1.5 GiB/16.0 GiB"]
    assert alpha[-1] == "cordoned by ann@host: fan is loud"
    assert (beta[1], beta[5:7], beta[-1]) == ("LOST", ["?", "?"], "-")


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (lease_pb2.SLOT_STATE_FREE, "free"),
        (lease_pb2.SLOT_STATE_LEASED, "leased"),
        (lease_pb2.SLOT_STATE_RESERVED, "reserved"),
        (lease_pb2.SLOT_STATE_CORDONED, "cordoned"),
        (lease_pb2.SLOT_STATE_UNHEALTHY, "unhealthy"),
        (lease_pb2.SLOT_STATE_FOREIGN, "foreign"),
        (4711, "4711"),
    ],
)
def test_a_gpu_says_what_its_slot_is_doing(
    state: lease_pb2.SlotState.ValueType, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    echo_gpus([FleetGpu(worker_name="alpha", gpu=Gpu(slot=1, name="H100"), lease=GpuLease(state=state))])
    headings, row = columns(capsys.readouterr().out)
    assert row[:2] == ["alpha/1", word]
    assert (headings[-1], row[-1]) == ("REASON", "-")


def test_everything_that_is_known_against_a_gpu_is_told() -> None:
    lease = GpuLease(
        health=gpu_pb2.GPU_HEALTH_XID_ERROR,
        health_reason="Xid 79:  fell off the bus",
        cordon=CORDON,
        foreign_processes=[
            ForeignProcess(pid=7, user="bob", command="python train.py", device_memory_bytes=2**30),
            ForeignProcess(pid=8),
            ForeignProcess(pid=9, workload_id="w-1", workload_name="one"),
        ],
    )
    assert gpu_reason(lease) == (
        "XID_ERROR: Xid 79: fell off the bus; cordoned by ann@host: fan is loud; "
        "pid 7 of bob (python train.py) holds 1.0 GiB; pid 8; pid 9 of workload one, which does not lease it"
    )
    assert gpu_reason(GpuLease(health=gpu_pb2.GPU_HEALTH_THROTTLED)) == "THROTTLED"
    assert gpu_reason(GpuLease(health=gpu_pb2.GPU_HEALTH_OK)) == ""


def test_workloads_say_where_they_come_from_only_where_that_is_something(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = workload()
    plain.user = "root"
    echo_workloads([plain], GPUS)
    assert columns(capsys.readouterr().out)[0] == ["NAME", "STATE", "GPUS", "PARKED", "PID", "CREATED", "ID"]
    claimed = workload("mine")
    claimed.origin, claimed.user = workload_pb2.WORKLOAD_ORIGIN_CLAIM, "ann"
    echo_workloads([plain, claimed], GPUS)
    headings, first, second = columns(capsys.readouterr().out)
    assert headings[:5] == ["NAME", "STATE", "ORIGIN", "USER", "GPUS"]
    assert first[2:5] == ["run", "root", "alpha/0"]
    assert second[2:4] == ["claim", "ann"]


def test_users_are_told_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = workload(), workload("two")
    first.user, second.user = "ann", "bob"
    echo_workloads([first, second], GPUS)
    assert columns(capsys.readouterr().out)[0][:4] == ["NAME", "STATE", "USER", "GPUS"]


def test_owners_are_shown_if_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [workload("one"), workload("two")]
    for one, owner in zip(listed, ("local/ann", "user/ben"), strict=True):
        one.owner = owner
    echo_workloads(listed, GPUS)
    headings, first, second = columns(capsys.readouterr().out)
    assert (headings[2], first[2], second[2]) == ("OWNER", "local/ann", "user/ben")


def test_a_helper_that_gave_its_gpus_back_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    helper = workload()
    helper.status.state, helper.status.yielded = workload_pb2.WORKLOAD_STATE_SUSPENDED, True
    echo_workloads([helper], GPUS)
    assert "SUSPENDED(yielded)" in capsys.readouterr().out


def test_no_workloads_are_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    echo_workloads([], GPUS)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_workload_of_a_worker_out_of_contact_says_as_of_when(capsys: pytest.CaptureFixture[str]) -> None:
    seen, unheard = workload("one"), workload("two")
    seen.out_of_contact = unheard.out_of_contact = True
    seen.report_time.FromSeconds(1_800_000_000)
    echo_workloads([seen, unheard], GPUS)
    _, *rows = columns(capsys.readouterr().out)
    assert [row[1] for row in rows] == ["RUNNING(as of 2027-01-15T08:00:00)", "RUNNING(never reported)"]
