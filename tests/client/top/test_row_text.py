"""Rows as text: every state has a letter and a word, and unknown is not zero."""

from typing import Any

import pytest
from leasehold.v1 import command_pb2, errors_pb2, eviction_pb2, gpu_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.gpu_pb2 import GpuSample
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_STOPPED as STOPPED
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse
from leasehold_client.top.details import detail_lines
from leasehold_client.top.fleet_model import FleetModel
from leasehold_client.top.row_text import row_pieces
from leasehold_client.top.rows import ClaimsRow, CommandRow, HostRow, Row, SlotRow, WorkloadRow
from leasehold_client.top.summary_text import counts_text

from .scripted_fleet import END_OF_SNAPSHOT, LEASED, NOW, command, gpu, parked, worker, workload


def line(row: Row, width: int = 200) -> str:
    return "".join(piece.text.ljust(piece.width) for piece in row_pieces(row, NOW.seconds + 125.0, width))


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (lease_pb2.SLOT_STATE_FREE, ". free"),
        (lease_pb2.SLOT_STATE_RESERVED, "r reserved"),
        (lease_pb2.SLOT_STATE_LEASED, "# leased"),
        (lease_pb2.SLOT_STATE_CORDONED, "c cordoned"),
        (lease_pb2.SLOT_STATE_UNHEALTHY, "! unhealthy"),
        (lease_pb2.SLOT_STATE_FOREIGN, "f foreign"),
        (lease_pb2.SLOT_STATE_UNSPECIFIED, "? unspecified"),
        (99, "? 99"),
    ],
)
def test_every_state_of_a_slot(state: lease_pb2.SlotState.ValueType, shown: str) -> None:
    one = gpu(0, state)
    assert shown in line(SlotRow(one, one.lease.sample, None))
    assert shown[0] in line(HostRow(worker(), [one], [], is_open=True))


def test_measurements_and_unknown_ones() -> None:
    one = gpu(3)
    assert "60.0/80 GiB   97%  71 C  2m         ok" in line(SlotRow(one, one.lease.sample, None))
    one.lease.ClearField("sample")
    assert "?/? GiB         ?     ?" in line(SlotRow(one, GpuSample(), None))


def test_a_problem_is_told_at_any_width() -> None:
    one = gpu(0, lease_pb2.SLOT_STATE_UNHEALTHY, health_reason="Xid 79")
    one.lease.health = gpu_pb2.GPU_HEALTH_XID_ERROR
    for width in (80, 200):
        assert "XID_ERROR: Xid 79" in line(SlotRow(one, one.lease.sample, None), width)


@pytest.mark.parametrize("width", [80, 120, 179, 180, 240])
def test_no_column_is_beyond_the_width(width: int) -> None:
    leased, faulty = gpu(0, LEASED, "one"), gpu(1, lease_pb2.SLOT_STATE_UNHEALTHY, health_reason="Xid 79")
    leased.gpu.name = "NVIDIA H100 80GB HBM3"
    faulty.lease.health = gpu_pb2.GPU_HEALTH_XID_ERROR
    holder = workload("one", "GPU-alpha-0")
    holder.spec.eviction.weight_strategy = eviction_pb2.WEIGHT_STRATEGY_RETAIN
    machine = worker(host_memory_available_bytes=100 << 30, driver_version="580.65.06")
    slots = [leased] * 8
    host = line(HostRow(machine, slots, [parked("two")], is_open=True), width)
    held = line(SlotRow(leased, leased.lease.sample, holder), width)
    problem = line(SlotRow(faulty, faulty.lease.sample, None), width)
    ended = command("c", state=command_pb2.COMMAND_STATE_SUCCEEDED, end_time=NOW, actor="user/eve")
    for text in (host, held, problem, line(CommandRow(ended, "one", "alpha", {}), width)):
        assert len(text.rstrip()) <= width
    assert "XID_ERROR: Xid 79" in problem
    is_wide = width >= 180
    assert [("driver 580.65.06" in host), ("retain" in held), ("H100" in held)] == [is_wide] * 3


def test_hosts_out_of_contact_say_since_when() -> None:
    lost = worker(state=worker_pb2.WORKER_STATE_LOST)
    assert "LOST" in line(HostRow(lost, [], [], is_open=True))
    assert "seen 2m ago" in line(HostRow(lost, [], [], is_open=True))
    lost.pending_claimers = 1
    assert "waiting" not in line(HostRow(lost, [], [], is_open=True))
    lost.ClearField("gpu_count")
    assert "GPUs: ?" in line(HostRow(lost, [], [], is_open=True))


def test_parked_workloads_have_bytes_tier_and_age() -> None:
    assert "P suspended    two" in line(WorkloadRow(parked("two")), 80)
    assert "24.0 GiB in host memory  2m" in line(WorkloadRow(parked("two")), 80)
    on_disk = workload("x", state=workload_pb2.WORKLOAD_STATE_CHECKPOINTED, disk_bytes=1 << 30)
    assert "1.0 GiB on disk" in line(WorkloadRow(on_disk))
    unknown = workload("x", state=workload_pb2.WORKLOAD_STATE_SUSPENDED)
    assert "size unknown" in line(WorkloadRow(unknown))


def sleeping(strategy: eviction_pb2.WeightStrategy.ValueType, **status: Any) -> Workload:
    by = eviction_pb2.EvictionPolicy(weight_strategy=strategy)
    return workload("x", state=workload_pb2.WORKLOAD_STATE_SLEEPING, parked_by=by, park_time=NOW, **status)


@pytest.mark.parametrize(
    ("parked_one", "own", "in_sum"),
    [
        (sleeping(eviction_pb2.WEIGHT_STRATEGY_DISCARD, parked_bytes=3), "weights discarded ", "0 B"),
        (sleeping(eviction_pb2.WEIGHT_STRATEGY_OFFLOAD, parked_bytes=3), "3 B in host memory", "3 B"),
        (sleeping(eviction_pb2.WEIGHT_STRATEGY_RETAIN), "size unknown", "size unknown"),
        (workload("x", state=STOPPED, park_time=NOW, parked_bytes=3), "0 B on disk", "0 B"),
        (workload("x", state=STOPPED, park_time=NOW, checkpoint_id="c", disk_bytes=3), "3 B on disk", "3 B"),
        (workload("x", state=STOPPED, park_time=NOW, checkpoint_id="c"), "size unknown", "size unknown"),
        (workload("x", state=STOPPED), "size unknown", "size unknown"),  # as the coordinator hides others'
    ],
)
def test_sizes_are_those_of_the_page(parked_one: Workload, own: str, in_sum: str) -> None:
    assert own in line(WorkloadRow(parked_one))
    assert f"1 parked, {in_sum}, no driver" in line(HostRow(worker(), [], [parked_one], is_open=True))
    assert f"{own.strip()}, for " in details(WorkloadRow(parked_one))


def test_an_unknown_size_is_not_zero_in_a_sum() -> None:
    unknown = workload("of-bob", state=workload_pb2.WORKLOAD_STATE_SUSPENDED)
    told = {
        "1 parked, size unknown": [unknown],
        "1 parked, 24.0 GiB": [parked("two")],
        "2 parked, 24.0 GiB and 1 of unknown size": [parked("two"), unknown],
    }
    for text, workloads in told.items():
        assert text in line(HostRow(worker(), [], workloads, is_open=True))
        model = FleetModel()
        for one in workloads:
            model.fold_workloads(WatchWorkloadsResponse(workload=one))
        model.fold_workloads(WatchWorkloadsResponse(bookmark=END_OF_SNAPSHOT))
        assert f" | {text}" in counts_text(model)


def test_gpus_out_of_contact_are_not_free() -> None:
    model = FleetModel()
    lost = worker("beta", state=worker_pb2.WORKER_STATE_LOST, pending_claimers=1)
    for one in (worker(pending_claimers=0), lost):
        model.fold_fleet(WatchFleetResponse(worker=one))
    for known in (gpu(0), gpu(1), gpu(0, worker="beta")):
        model.fold_fleet(WatchFleetResponse(gpu=known))
    model.fold_fleet(WatchFleetResponse(bookmark=END_OF_SNAPSHOT))
    assert counts_text(model) == "2 hosts, 1 out of contact | 3 GPUs: 2 free, 1 out of contact"


def test_a_gpu_of_an_unknown_worker_is_not_out_of_contact() -> None:
    model = FleetModel()
    for known in (gpu(0), gpu(0, worker="beta")):
        model.fold_fleet(WatchFleetResponse(gpu=known))
    model.fold_fleet(WatchFleetResponse(worker=worker()))
    model.fold_fleet(WatchFleetResponse(bookmark=END_OF_SNAPSHOT))
    assert counts_text(model) == "1 host | 2 GPUs: 1 free"


def test_waiting_claims() -> None:
    assert "1 claim waits" in line(ClaimsRow(worker(pending_claimers=1)))


def test_commands_have_phases_and_rates() -> None:
    assert "RUNNING    2m          " in line(CommandRow(command("c"), "one", "alpha", {}))
    ended = command("c", state=command_pb2.COMMAND_STATE_SUCCEEDED, end_time=NOW)
    ended.result.duration.FromSeconds(2)
    phase = ended.result.phases.add(phase="checkpoint", moved_bytes=20 << 30)
    phase.duration.FromSeconds(2)
    shown = line(CommandRow(ended, "one", "alpha", {}))
    assert "took 2.0 s: checkpoint 2.0 s (20.0 GiB, 10.0 GiB/s)" in shown
    assert "2m ago" in shown


def test_an_unknown_duration_of_a_command_is_not_zero() -> None:
    ended = command("c", state=command_pb2.COMMAND_STATE_SUCCEEDED, end_time=NOW)
    ended.result.warnings.append("the worker restarted during the command and found it complete")
    row = CommandRow(ended, "one", "alpha", {})
    assert line(row).endswith("took ?")
    assert "took" not in details(row)


def test_a_failed_command_names_its_gpus() -> None:
    failed = command("c", state=command_pb2.COMMAND_STATE_REJECTED)
    uuid = f"GPU-{'a' * 8}-0000-0000-0000-{'b' * 12}"
    failed.error.CopyFrom(
        errors_pb2.Error(reason=errors_pb2.ERROR_REASON_UNKNOWN_GPU, message=f"{uuid} is not there")
    )
    assert "alpha/0 is not there" in line(CommandRow(failed, "one", "alpha", {uuid: "alpha/0"}))


def details(row: Row) -> str:
    return "\n".join(detail_lines(row, {}, NOW.seconds + 125.0))


@pytest.mark.parametrize("state", command_pb2.CommandState.values())
def test_hidden_fields_of_a_command_are_not_zero(state: command_pb2.CommandState.ValueType) -> None:
    row = CommandRow(command("c", state=state, phase=""), "one", "alpha", {})
    for text in (line(row), details(row)):
        for wrong in ("took", " 0 ", "UNSPECIFIED)", "- ", " -"):
            assert wrong not in text
    if state == command_pb2.COMMAND_STATE_RUNNING:
        assert "waits for its worker" not in line(row) + details(row)
        assert "phase    ?" in details(row)
    if state in (command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED):
        assert line(row).endswith("?")


def test_a_hidden_message_of_a_failure_leaves_its_reason() -> None:
    shared = command("c", state=command_pb2.COMMAND_STATE_FAILED, end_time=NOW)
    shared.error.reason = errors_pb2.ERROR_REASON_NOT_READY
    row = CommandRow(shared, "one", "alpha", {})
    assert line(row).endswith(" NOT_READY")
    assert "FAILED: NOT_READY" in details(row)


def test_hidden_fields_of_a_parked_workload_are_unknown() -> None:
    row = WorkloadRow(workload("of-bob", state=workload_pb2.WORKLOAD_STATE_SUSPENDED))
    assert "policy   default" in details(row)
    row.workload.ClearField("spec")
    assert "policy" not in details(row)
    assert "size unknown, for ?" in details(row)
    assert line(row, 80).rstrip().endswith("size unknown             ?")


def test_a_long_operation_is_cut_before_its_target() -> None:
    reset = command("c")
    reset.operation.reset_gpu_health.SetInParent()
    assert "reset_gpu… alpha/1" in line(CommandRow(reset, "alpha/1", "alpha", {}))
