"""Tables of workers, GPUs and workloads."""

import pytest
from leasehold.v1 import command_pb2, errors_pb2, gpu_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease
from leasehold.v1.worker_pb2 import Capability, FleetGpu, MachineResources, Worker
from leasehold_client.arguments.gpu_names import gpu_places
from leasehold_client.display.fleet_tables import GPU_COLUMNS, WORKER_COLUMNS, gpu_reason, workload_columns
from leasehold_client.display.record_tables import command_columns
from leasehold_client.display.tables import View, echo_table
from leasehold_coordinator.core.permitted_fields import COMMAND, SHARED_COMMAND, WORKLOAD, restricted

from tests.client.scripted_coordinator import GPUS, command, workload

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
    echo_table(
        WORKER_COLUMNS,
        [
            Worker(name="alpha", state=worker_pb2.WORKER_STATE_CONNECTED, cordon=CORDON, resources=machine),
            Worker(
                name="beta",
                state=worker_pb2.WORKER_STATE_LOST,
                capabilities=[
                    Capability(name="gpu_remap", reason="old"),
                    Capability(name="commands", reason="the disk\nis full"),
                ],
            ),
            Worker(
                name="gamma",
                state=worker_pb2.WORKER_STATE_STALE,
                refusal="worker/gamma is blocked",
                cordon=CORDON,
            ),
        ],
    )
    headings, alpha, beta, gamma = columns(capsys.readouterr().out)
    assert headings[5:7] == ["CPU", "MEMORY"]
    assert alpha[:2] == ["alpha", "CONNECTED,cordoned"]
    assert alpha[5:7] == ["2.5/8", "1.5 GiB/16.0 GiB"]
    assert alpha[-1] == "cordoned by ann@host: fan is\\nloud"
    assert (beta[1], beta[5:7]) == ("LOST", ["?", "?"])
    assert beta[-1] == "no commands: the disk\\nis full"
    assert gamma[-1] == "refused: worker/gamma is blocked; cordoned by ann@host: fan is\\nloud"


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
    echo_table(
        GPU_COLUMNS,
        [FleetGpu(worker_name="alpha", gpu=Gpu(slot=1, name="H100"), lease=GpuLease(state=state))],
    )
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
        "XID_ERROR: Xid 79:  fell off the bus; cordoned by ann@host: fan is\\nloud; "
        "pid 7 of bob (python train.py) holds 1.0 GiB; pid 8; pid 9 of workload one, which does not lease it"
    )
    assert gpu_reason(GpuLease(health=gpu_pb2.GPU_HEALTH_THROTTLED)) == "THROTTLED"
    assert gpu_reason(GpuLease(health=gpu_pb2.GPU_HEALTH_OK)) == ""


def test_the_columns_of_workloads_are_the_same_for_every_list(capsys: pytest.CaptureFixture[str]) -> None:
    claimed = workload("mine")
    claimed.origin, claimed.user = workload_pb2.WORKLOAD_ORIGIN_CLAIM, "ann"
    claimed.owner = "host/alpha/ann"
    columns_of = workload_columns(gpu_places(GPUS))
    headings = ["NAME", "STATE", "GPUS", "OWNER", "PARKED", "AGE"]
    for listed in ([], [workload()], [workload(), claimed]):
        echo_table(columns_of, listed)
        assert columns(capsys.readouterr().out)[0] == headings
    echo_table(columns_of, [workload(), claimed], View(names=("name", "owner", "origin", "user")))
    assert columns(capsys.readouterr().out)[1:] == [
        ["one", "-", "run", "-"],
        ["mine", "host/alpha/ann", "claim", "ann"],
    ]


def test_a_helper_that_gave_its_gpus_back_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    helper = workload()
    helper.status.state, helper.status.yielded = workload_pb2.WORKLOAD_STATE_SUSPENDED, True
    echo_table(workload_columns(gpu_places(GPUS)), [helper])
    assert "SUSPENDED(yielded)" in capsys.readouterr().out


def test_no_workloads_are_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    echo_table(workload_columns(gpu_places(GPUS)), [])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_workload_of_a_worker_out_of_contact_says_as_of_when(capsys: pytest.CaptureFixture[str]) -> None:
    seen, unheard, new, ahead = (workload(name) for name in ("one", "two", "three", "four"))
    for one in (seen, unheard, new, ahead):
        one.out_of_contact = True
    for one in (seen, new, ahead):
        one.report_time.FromSeconds(1_800_000_000)
    for one in (new, ahead):  # the create time of a local claim is by the worker's clock
        one.create_time.FromSeconds(1_800_000_001)
    new.status.state = workload_pb2.WORKLOAD_STATE_PENDING
    echo_table(workload_columns(gpu_places(GPUS)), [seen, unheard, new, ahead])
    _, *rows = columns(capsys.readouterr().out)
    assert [row[1] for row in rows] == [
        "RUNNING(as of 2027-01-15T08:00:00Z)",
        "RUNNING(not reported since the coordinator started)",
        "PENDING(not reported yet)",
        "RUNNING(as of 2027-01-15T08:00:00Z)",
    ]


def test_hidden_fields_of_a_workload_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = ("origin", "user", "priority", "eviction", "pid", "labels")
    own = workload()
    echo_table(workload_columns(gpu_places(GPUS)), [own], View(names=hidden))
    assert columns(capsys.readouterr().out)[1] == ["run", "-", "0", "-", "-", "-"]
    own.labels["team"], own.status.parked_bytes, own.spec.priority = "a", 2**30, 7
    others = restricted(own, WORKLOAD)
    echo_table(workload_columns(gpu_places(GPUS)), [others], View(names=(*hidden, "parked")))
    assert columns(capsys.readouterr().out)[1] == ["?"] * 6 + ["-"]
    others.status.state = workload_pb2.WORKLOAD_STATE_SUSPENDED
    echo_table(workload_columns(gpu_places(GPUS)), [others], View(names=("parked",)))
    assert columns(capsys.readouterr().out)[1] == ["?"]


def test_hidden_fields_of_a_command_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    own = command(command_pb2.COMMAND_STATE_SUCCEEDED)
    own.update_time.FromSeconds(1)
    failed = command(command_pb2.COMMAND_STATE_FAILED, actor="user/ann")
    failed.update_time.FromSeconds(1)
    failed.error.reason, failed.error.message = errors_pb2.ERROR_REASON_NOT_READY, "one is not ready"
    for_bob = command(command_pb2.COMMAND_STATE_SUCCEEDED, actor="service/gw", on_behalf_of="user/bob")
    seen = [own, failed, restricted(failed, SHARED_COMMAND), restricted(failed, COMMAND), for_bob]
    echo_table(command_columns({}), seen, View(names=("phase", "actor", "message")))
    assert columns(capsys.readouterr().out)[1:] == [
        ["-", "-", "-"],
        ["-", "user/ann", "one is not ready"],
        ["-", "user/ann", "NOT_READY"],
        ["?", "?", "?"],
        ["?", "service/gw for user/bob", "-"],
    ]
