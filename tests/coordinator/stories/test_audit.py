"""Each change writes one row of the audit, in its own transaction."""

import json
import resource
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from leasehold.v1 import fleet_service_pb2, lease_pb2, workload_pb2, workload_service_pb2
from leasehold.v1.access_service_pb2 import ROLE_USER, GrantRequest, RevokeRequest, RoleBinding
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_ALLOWED, AuditEntry
from leasehold.v1.audit_service_pb2 import (
    ListAuditEntriesRequest,
    VerifyAuditRequest,
    VerifyAuditResponse,
)
from leasehold.v1.audit_service_pb2_grpc import AuditServiceStub
from leasehold.v1.certificate_service_pb2 import (
    BlockIdentityRequest,
    ListAuthoritiesRequest,
    ListCertificatesRequest,
    RetireAuthorityRequest,
    RevokeCertificateRequest,
    RotateAuthorityRequest,
    UnblockIdentityRequest,
)
from leasehold.v1.certificate_service_pb2_grpc import CertificateServiceStub
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import CancelCommandRequest, ListCommandsRequest
from leasehold.v1.enrolment_service_pb2 import CreateJoinTokenRequest, DeleteJoinTokenRequest
from leasehold.v1.enrolment_service_pb2_grpc import EnrolmentServiceStub
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.operation_pb2 import (
    AdoptOperation,
    CordonOperation,
    DeleteCheckpointsOperation,
    ResetGpuHealthOperation,
    SuspendOperation,
    UncordonOperation,
)
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.worker.v1.session_pb2 import ConnectRequest, Goodbye, WorkloadEvent
from leasehold_client.config import CREDENTIALS_VARIABLE
from leasehold_coordinator.access.methods import CHANGES
from leasehold_coordinator.server.health_reports import AUDIT_FILE

from tests.certificates import enrol
from tests.coordinator.api.test_authentication import channel_with, ending
from tests.coordinator.api.test_command_service import refusal, reported, start, suspend
from tests.coordinator.api.test_watches import exit_workload
from tests.coordinator.commands.test_plans import swap
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.server.test_own_pki import near
from tests.coordinator.stories.test_lifecycle import state_of, until
from tests.coordinator.stories.test_owners import OWN

SUSPENDED = workload_pb2.WORKLOAD_STATE_SUSPENDED
SECRET = "hunter2"
OF_WORKERS = {"Connect", "Join", "RenewCertificate", "UnbindGpu"}
"""These need a worker that enrols or is enrolled: see test_enrolment.py and test_own_pki.py."""


def entries(coordinator: CoordinatorProcess, filter_text: str = "") -> list[AuditEntry]:
    """The entries that match, newest first."""
    request = ListAuditEntriesRequest(filter=filter_text, page_size=1000)
    return list(AuditServiceStub(coordinator.channel).ListAuditEntries(request).entries)


def verify(coordinator: CoordinatorProcess, page_token: str = "") -> VerifyAuditResponse:
    return AuditServiceStub(coordinator.channel).VerifyAudit(VerifyAuditRequest(page_token=page_token))


def successes(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, away: ScriptedWorker
) -> dict[str, Callable[[], object]]:
    """A call of each method that succeeds and changes something, and the state of the fleet that it needs."""
    workloads, fleet, service = coordinator.workloads, coordinator.fleet, workload_service_pb2
    names = "one", "two", "suspended", "held", "stopped", "ready", "saved", "cancelled", "gone", "leased"
    started = {name: start(coordinator, worker, name) for name in names}
    exit_workload(coordinator, worker, started["gone"])
    parked = WorkloadEvent(workload=reported(started["suspended"], SUSPENDED, 2))
    worker.up.put(ConnectRequest(workload_event=parked))
    until(lambda: state_of(coordinator, "suspended") == SUSPENDED)
    hold = SuspendOperation(hold_for=Duration(seconds=60))
    hold_id = suspend(coordinator, "held", operation=hold).command_id
    cancelled = suspend(coordinator, "cancelled").command_id
    away.welcome()
    away.close()
    until(lambda: "worker-beta" not in connected(coordinator))
    lease = worker.first.hello.gpu_leases[0]
    lease.state, lease.workload_id = lease_pb2.SLOT_STATE_LEASED, started["leased"].workload_id
    worker.report()
    asked = fleet_service_pb2.ListGpusRequest(filter="state = LEASED")
    until(lambda: bool(fleet.ListGpus(asked).gpus))
    spec = workload_pb2.WorkloadSpec(arguments=["program"], environment={"PASSWORD": SECRET})
    calls: dict[str, Callable[[], object]] = {
        "CreateWorkload": lambda: workloads.CreateWorkload(service.CreateWorkloadRequest(spec=spec)),
        "UpdateWorkload": lambda: workloads.UpdateWorkload(
            service.UpdateWorkloadRequest(workload=Workload(workload_id="one", labels={"team": "a"}))
        ),
        "DeleteWorkload": lambda: workloads.DeleteWorkload(service.DeleteWorkloadRequest(workload="gone")),
        "SuspendWorker": lambda: workloads.SuspendWorker(service.SuspendWorkerRequest(worker="alpha")),
        "RestoreWorkload": lambda: workloads.RestoreWorkload(
            service.RestoreWorkloadRequest(workload="suspended")
        ),
        "CheckpointWorkload": lambda: workloads.CheckpointWorkload(
            service.CheckpointWorkloadRequest(workload="saved")
        ),
        "RemapWorkloads": lambda: workloads.RemapWorkloads(
            service.RemapWorkloadsRequest(operation=swap().remap)
        ),
        "StopWorkload": lambda: workloads.StopWorkload(service.StopWorkloadRequest(workload="stopped")),
        "ReleaseWorkload": lambda: workloads.ReleaseWorkload(
            service.ReleaseWorkloadRequest(workload="adopted")
        ),
        "ReleaseHold": lambda: workloads.ReleaseHold(service.ReleaseHoldRequest(hold_id=hold_id)),
        "DeleteCheckpoints": lambda: workloads.DeleteCheckpoints(
            service.DeleteCheckpointsRequest(
                worker="alpha", operation=DeleteCheckpointsOperation(checkpoint_ids=["k-1"])
            )
        ),
        "AdoptProcess": lambda: workloads.AdoptProcess(
            service.AdoptProcessRequest(worker="alpha", operation=AdoptOperation(pid=77))
        ),
        "CancelCommand": lambda: coordinator.commands.CancelCommand(
            CancelCommandRequest(command_id=cancelled)
        ),
        "Cordon": lambda: fleet.Cordon(
            fleet_service_pb2.CordonRequest(
                worker="alpha", operation=CordonOperation(reason="x", cordoned_by="a")
            )
        ),
        "Uncordon": lambda: fleet.Uncordon(
            fleet_service_pb2.UncordonRequest(worker="alpha", operation=UncordonOperation())
        ),
        "ResetGpuHealth": lambda: fleet.ResetGpuHealth(
            fleet_service_pb2.ResetGpuHealthRequest(
                worker="alpha", operation=ResetGpuHealthOperation(gpu_uuids=["GPU-alpha-1"])
            )
        ),
        "DeleteWorker": lambda: fleet.DeleteWorker(
            fleet_service_pb2.DeleteWorkerRequest(worker="worker-beta")
        ),
    }
    access, binding = AccessServiceStub(coordinator.channel), RoleBinding(identity="user/a", role=ROLE_USER)
    calls["Grant"] = lambda: access.Grant(GrantRequest(binding=binding))
    calls["Revoke"] = lambda: access.Revoke(RevokeRequest(binding=binding))
    enrolment = EnrolmentServiceStub(coordinator.channel)
    wanted = CreateJoinTokenRequest(identity="worker/gamma")
    token_id = enrolment.CreateJoinToken(wanted).join_token.join_token_id
    calls["CreateJoinToken"] = lambda: enrolment.CreateJoinToken(wanted)
    unwanted = DeleteJoinTokenRequest(join_token_id=token_id)
    calls["DeleteJoinToken"] = lambda: enrolment.DeleteJoinToken(unwanted)
    certificates = CertificateServiceStub(coordinator.channel)

    def authorities() -> list[str]:
        found = certificates.ListAuthorities(ListAuthoritiesRequest()).authorities
        return [authority.serial for authority in found]

    known = certificates.ListCertificates(ListCertificatesRequest()).certificates
    serial = next(one.serial for one in known if one.identity == "user/a")
    calls["SuspendWorkload"] = partial(suspend, coordinator, "ready")
    calls |= {
        "RevokeCertificate": lambda: certificates.RevokeCertificate(RevokeCertificateRequest(serial=serial)),
        "BlockIdentity": lambda: certificates.BlockIdentity(BlockIdentityRequest(identity="user/a")),
        "UnblockIdentity": lambda: certificates.UnblockIdentity(UnblockIdentityRequest(identity="user/a")),
        "RotateAuthority": lambda: certificates.RotateAuthority(RotateAuthorityRequest()),
        "RetireAuthority": lambda: certificates.RetireAuthority(
            RetireAuthorityRequest(serial=authorities()[-1], force=True)
        ),
    }
    return calls


def connected(coordinator: CoordinatorProcess) -> list[str]:
    request = fleet_service_pb2.ListWorkersRequest(filter="state = CONNECTED")
    return [worker.worker_id for worker in coordinator.fleet.ListWorkers(request).workers]


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoordinatorProcess]:
    """A coordinator with workers of other hosts, and an authority of its own, which may be rotated."""
    state = tmp_path / "state"
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(state))
    options = ["--state-dir", str(state), "--join-listen", "127.0.0.1:0"]
    started = CoordinatorProcess(tmp_path, worker_address="0.0.0.0:0", options=options)
    names = ("user/a", "worker/alpha", "worker/beta")
    _, *holders = enrol(tmp_path / "store.sqlite3", state, *names)
    started.start()
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1)
    origin = workload_pb2.WORKLOAD_ORIGIN_ADOPT
    adopted = Workload(workload_id="w-adopted", name="adopted", origin=origin, status=status)
    hellos = make_hello(gpu_count=4, workloads=[adopted]), make_hello("beta")
    for holder, hello in zip(holders, hellos, strict=True):
        channel = holder.open_channel(near(started.worker_address))
        started.workers.append(ScriptedWorker(channel, ConnectRequest(hello=hello)))
    yield started
    for worker in started.workers:
        worker.close()
    assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


def test_each_change_writes_one_row(apart: CoordinatorProcess) -> None:
    """The deletion of an enrolled worker is two changes: first its certificates are revoked."""
    coordinator, (worker, away) = apart, apart.workers
    worker.welcome()
    calls = successes(coordinator, worker, away)
    changes = {method.rpartition("/")[2] for method in CHANGES}
    assert {*calls} | OF_WORKERS == changes, "add a call that succeeds"
    last = entries(coordinator)[0].number
    for name, call in calls.items():
        answer = call()
        entry, *others = entries(coordinator, f"number > {last}")
        assert [other.resource for other in others] == (["worker/beta"] if name == "DeleteWorker" else [])
        assert (entry.method.rpartition("/")[2], entry.number) == (name, last + 1 + len(others))
        assert (entry.identity, entry.outcome, entry.count) == (OWN, AUDIT_OUTCOME_ALLOWED, 1)
        assert entry.address.startswith("ipv4:127.0.0.1")
        assert entry.resource, name
        command = getattr(answer, "command", answer)
        if isinstance(command, Command):
            assert entry.command_id == command.command_id
        assert isinstance(json.loads(entry.arguments), dict)
        assert SECRET not in str(entry)
        last = entry.number
    assert "PASSWORD" in entries(coordinator, "method:CreateWorkload")[0].arguments
    found = verify(coordinator)
    assert (found.last_number, found.HasField("broken")) == (last, False)
    assert found.last_hash == entries(coordinator)[0].hash


def test_what_changes_nothing_writes_no_row(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    started = start(coordinator, worker)
    request = workload_service_pb2.StopWorkloadRequest(workload="one", request_id="r-1")
    command = coordinator.workloads.StopWorkload(request).command
    before = entries(coordinator)
    assert coordinator.workloads.StopWorkload(request).command.command_id == command.command_id
    bare = Workload(workload_id=started.workload_id)
    coordinator.workloads.UpdateWorkload(workload_service_pb2.UpdateWorkloadRequest(workload=bare))
    worker.succeed("stop")
    assert entries(coordinator) == before


def test_entries_are_found_by_their_fields(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    started = start(coordinator, worker)
    time_text = entries(coordinator)[0].time.ToJsonString()
    for wanted in (
        f'identity = "{OWN}"',
        "method:CreateWorkload",
        f"time >= {time_text}",
        "outcome = ALLOWED",
        f'resource = "workload/{started.workload_id}"',
        "number = 1",
    ):
        assert [entry.number for entry in entries(coordinator, wanted)] == [1], wanted
    for unwanted in ('identity = "user/other"', f"time > {time_text}", "outcome = REFUSED"):
        assert entries(coordinator, unwanted) == []


def test_long_arguments_are_cut_and_have_a_digest(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    for text in ("x" * 9_000, "x" * 8_999 + "y"):
        changed = Workload(workload_id="one", annotations={"note": text})
        coordinator.workloads.UpdateWorkload(workload_service_pb2.UpdateWorkloadRequest(workload=changed))
    second, first = entries(coordinator, "method:Update")
    assert len(first.arguments.encode()) == 4096
    assert first.arguments == second.arguments
    assert len(first.arguments_digest) == 32
    assert first.arguments_digest != second.arguments_digest


@pytest.mark.parametrize(
    ("damage", "number", "problem"),
    [
        (
            "UPDATE audit SET record = replace(record, 'team', 'tame') WHERE number = 2",
            2,
            "digest of its row",
        ),
        ("DELETE FROM audit WHERE number = 2", 2, "missing"),
        ("UPDATE audit SET record = x'00' WHERE number = 3", 3, "can't be parsed"),
        (
            "UPDATE audit SET record = (SELECT record FROM audit WHERE number = 1) WHERE number = 2",
            2,
            "number 1",
        ),
        ("DELETE FROM audit WHERE number = 4", 4, "missing"),
    ],
)
def test_verify_finds_what_was_changed(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, damage: str, number: int, problem: str
) -> None:
    start(coordinator, worker)
    for count in range(3):
        changed = Workload(workload_id="one", labels={"team": str(count)})
        coordinator.workloads.UpdateWorkload(workload_service_pb2.UpdateWorkloadRequest(workload=changed))
    assert not verify(coordinator).HasField("broken")
    with closing(sqlite3.connect(coordinator.folder / "store.sqlite3")) as connection, connection:
        connection.execute(damage.replace("replace(record, 'team', 'tame')", REPLACED))
    found = verify(coordinator)
    assert (found.broken.number, found.last_number) == (number, number - 1)
    assert problem in found.broken.problem


REPLACED = "CAST(replace(CAST(record AS TEXT), 'team', 'tame') AS BLOB)"


def test_refusals_are_counted_and_outlive_the_coordinator(coordinator: CoordinatorProcess) -> None:
    stub = FleetServiceStub(channel_with(coordinator.address, "Bearer wrong"))
    asked = fleet_service_pb2.ListWorkersRequest()
    for _ in range(3):
        assert ending(lambda: stub.ListWorkers(asked))[1] == "UNAUTHENTICATED"
    first = ConnectRequest(goodbye=Goodbye())
    coordinator.connect(first=first).wait_ended()
    clone = make_hello("alpha")
    clone.worker_id, clone.name = "worker-beta", "beta"
    coordinator.connect().welcome()
    coordinator.connect(clone).wait_ended()
    until(lambda: bool(entries(coordinator, "outcome = REFUSED")))
    coordinator.end(signal.SIGTERM)
    coordinator.start()
    found = Counter[tuple[str, str]]()
    for entry in entries(coordinator, "outcome = REFUSED"):
        found[(entry.identity, entry.method.rpartition("/")[2])] += entry.count
        assert entry.address == "ipv4:127.0.0.1"
    assert found["worker/beta", "Connect"] == 1
    assert found["", "ListWorkers"] >= 1
    assert found.total() == 5
    (clone_entry,) = entries(coordinator, 'identity = "worker/beta"')
    assert ErrorReason.Name(clone_entry.reason) == "ERROR_REASON_DUPLICATE_WORKER_GPU"
    assert clone_entry.resource == "worker/beta"
    assert not verify(coordinator).HasField("broken")


def test_a_full_disk_stops_changes_and_no_reads(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    before = entries(coordinator)
    stub = FleetServiceStub(channel_with(coordinator.address, "Bearer wrong"))
    request = workload_service_pb2.StopWorkloadRequest(workload="one")
    limit = resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    code, reason = refusal(lambda: coordinator.workloads.StopWorkload(request))
    assert (code.name, reason) == ("UNAVAILABLE", "STORAGE_UNAVAILABLE")
    assert ending(lambda: stub.ListWorkers(fleet_service_pb2.ListWorkersRequest()))[1] == "UNAUTHENTICATED"
    assert entries(coordinator) == before
    assert state_of(coordinator) == workload_pb2.WORKLOAD_STATE_RUNNING
    assert not list(
        coordinator.commands.ListCommands(ListCommandsRequest(filter="operation = stop")).commands
    )
    resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE, limit)
    until(lambda: bool(entries(coordinator, "outcome = REFUSED")))
    reasons = {ErrorReason.Name(entry.reason) for entry in entries(coordinator, "outcome = REFUSED")}
    assert reasons == {"ERROR_REASON_UNAUTHENTICATED"}, "a failure of the store is no refusal"
    command = coordinator.workloads.StopWorkload(request).command
    assert entries(coordinator, "method:StopWorkload")[0].command_id == command.command_id
    assert not verify(coordinator).HasField("broken")


def test_a_file_follows_the_audit(coordinator: CoordinatorProcess) -> None:
    path, settings = coordinator.folder / "audit.jsonl", coordinator.folder / "coordinator.toml"
    settings.write_text(f'audit_file = "{path}"\n')
    coordinator.end(signal.SIGTERM)
    coordinator.options = ["--config", str(settings)]
    coordinator.start()
    worker = coordinator.connect()
    worker.welcome()
    start(coordinator, worker)
    until(lambda: path.exists() and path.read_text().count("\n") == 1)
    shown = json.loads(path.read_text())
    (entry,) = entries(coordinator)
    assert (shown["number"], shown["identity"], shown["resource"]) == ("1", OWN, entry.resource)
    health: Any = HealthStub(coordinator.channel)  # its stub has no types
    asked = HealthCheckRequest(service=AUDIT_FILE)
    assert health.Check(asked).status == HealthCheckResponse.SERVING
    path.unlink()
    path.mkdir()
    changed = Workload(workload_id="one", labels={"team": "a"})
    coordinator.workloads.UpdateWorkload(workload_service_pb2.UpdateWorkloadRequest(workload=changed))
    until(lambda: health.Check(asked).status == HealthCheckResponse.NOT_SERVING)
    assert health.Check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
