"""Members with imported CUDA IPC memory, whose first restore wedges them (seen on driver 580.159.04)."""

from __future__ import annotations

from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.operation_pb2 import RemapOperation, RestoreOperation, StopOperation, SuspendOperation
from leasehold.worker.v1.session_pb2 import CommandUpdate
from leasehold_simgpu import ProcessState, SimulatedHost, Timing

from tests.worker.counters import counter_run, counters
from tests.worker.operations.test_handler import calls_of, leases, move, start, uuids
from tests.worker.scripted_coordinator import Session
from tests.worker.stories.test_membership import start_two, wait_until

SUSPENDED = workload_pb2.WORKLOAD_STATE_SUSPENDED
WEDGED = workload_pb2.WORKLOAD_STATE_WEDGED
SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
FAILED = command_pb2.COMMAND_STATE_FAILED


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


def require_wedged(session: Session, host: SimulatedHost, outcome: CommandUpdate, pid: int) -> None:
    """The workload is WEDGED, its GPUs are free, the importer is not called again, and a stop works."""
    assert outcome.state == FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_MEMBER_WEDGED, outcome.error
    assert f"process {pid} " in outcome.error.message
    assert "stop the workload" in outcome.error.message
    status = outcome.workloads[0].status
    assert (status.state, status.error.reason) == (WEDGED, errors_pb2.ERROR_REASON_MEMBER_WEDGED)
    wedged = {member.pid for member in status.members if member.state == workload_pb2.MEMBER_STATE_WEDGED}
    assert wedged == {pid}
    assert not status.lease.gpu_uuids
    leases(session, ["", "", "", ""])
    assert sum(gpu.used_bytes for gpu in host.gpus) == 0
    restores = calls_of(host, pid)["restore"]
    refused = session.run("again", "w1", restore=RestoreOperation())
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED
    assert session.run("other", "w2", run=counter_run("w2", 4)).state == SUCCEEDED, "the GPUs are usable"
    assert calls_of(host, pid)["restore"] == restores
    stopped = session.run("stop", "w1", stop=StopOperation())
    assert stopped.state == SUCCEEDED, stopped


@pytest.mark.long
@pytest.mark.parametrize("importer", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_restore_of_an_importer_wedges_its_workload_and_frees_its_gpus(
    session: Session, host: SimulatedHost, tmp_path: Path, importer: int
) -> None:
    start_two(session, host, tmp_path / "go")
    (tmp_path / "go").touch()
    wait_until(lambda: len(counters(host)) == 2, "the second counter uses its GPU")
    pids = [process.pid for process in counters(host)]
    host.set_ipc_importer(pids[importer])
    assert session.run("c2", "w1", suspend=SuspendOperation()).state == SUCCEEDED
    outcome = session.run("c3", "w1", restore=RestoreOperation())
    assert "CUDA IPC" in outcome.error.message
    exporter = host.process(pids[1 - importer])
    assert exporter is not None
    assert exporter.state is ProcessState.CHECKPOINTED
    assert calls_of(host, pids[importer])["restore"] == 1
    require_wedged(session, host, outcome, pids[importer])


@pytest.mark.long
def test_the_remap_of_an_importer_wedges_its_workload(session: Session, host: SimulatedHost) -> None:
    """The driver answers as for wrong pairs. The return to the old GPUs tells the difference."""
    pid = start(session, "w1")
    host.set_ipc_importer(pid)
    first, second = uuids(host)[:2]
    outcome = session.run("c2", "w1", remap=RemapOperation(moves=[move("w1", first, second)]))
    assert calls_of(host, pid)["restore"] == 2
    require_wedged(session, host, outcome, pid)


@pytest.mark.long
def test_an_importer_that_is_restored_elsewhere_is_wedged_once_its_old_gpu_fails_too(
    session: Session, host: SimulatedHost
) -> None:
    pid = start(session, "w1")
    host.set_ipc_importer(pid)
    first, second = uuids(host)[:2]
    session.run("c2", "w1", suspend=SuspendOperation())
    elsewhere = RestoreOperation(pairs=[GpuPair(old_uuid=first, new_uuid=second)])
    for number in range(2):
        refused = session.run(f"c{3 + number}", "w1", restore=elsewhere)
        assert refused.state == FAILED
        assert refused.workloads[0].status.state == SUSPENDED
        assert "restore it on its former GPUs" in refused.error.message, refused.error
        leases(session, ["", "", "", ""])
    home = RestoreOperation(pairs=[GpuPair(old_uuid=first, new_uuid=first)])
    require_wedged(session, host, session.run("c5", "w1", restore=home), pid)
