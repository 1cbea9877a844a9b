"""A service with a certificate acts for users, where a binding permits it."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import pytest
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding, WhoAmIRequest
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold.v1.audit_service_pb2 import ListAuditEntriesRequest
from leasehold.v1.audit_service_pb2_grpc import AuditServiceStub
from leasehold.v1.command_service_pb2 import GetCommandRequest
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest, GetWorkloadRequest, StopWorkloadRequest
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold_client.config import credentials_directory
from leasehold_coordinator.storage.rows import binding_row

from tests.certificates import enrol, write_rows
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until

IDENTITIES = ("service/batch", "user/alice", "user/bob", "worker/alpha")
ALICE = (("leasehold-on-behalf-of", "user/alice"),)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A coordinator for other hosts, its worker, and channels of its clients."""

    coordinator: CoordinatorProcess
    worker: ScriptedWorker
    batch: grpc.Channel
    alice: grpc.Channel


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A service that may act for alice, and not for bob."""
    folder: Path = tmp_path_factory.mktemp("behalf")
    holders = dict(
        zip(
            IDENTITIES,
            enrol(folder / "store.sqlite3", credentials_directory(), *IDENTITIES),
            strict=True,
        )
    )
    roles = [
        RoleBinding(identity=name, role=access_service_pb2.ROLE_USER)
        for name in ("service/batch", "user/alice", "user/bob")
    ]
    acting = RoleBinding(identity="service/batch", role=access_service_pb2.ROLE_ON_BEHALF_OF, users="user/a*")
    write_rows(folder / "store.sqlite3", *map(binding_row, [*roles, acting]))
    coordinator = CoordinatorProcess(folder, "0.0.0.0:0", "0.0.0.0:0")
    coordinator.start()
    clients, workers = (
        f"127.0.0.1:{address.rpartition(':')[2]}"
        for address in (coordinator.address, coordinator.worker_address)
    )
    hello = make_hello("alpha")
    worker = ScriptedWorker(holders["worker/alpha"].open_channel(workers), ConnectRequest(hello=hello))
    worker.welcome()
    with (
        holders["service/batch"].open_channel(clients) as batch,
        holders["user/alice"].open_channel(clients) as alice,
    ):
        yield Fleet(coordinator, worker, batch, alice)
    worker.close()
    assert coordinator.end(signal.SIGTERM) == 0
    assert "Traceback" not in coordinator.log()


def test_what_a_service_does_for_a_user_is_the_users(fleet: Fleet) -> None:
    found = AccessServiceStub(fleet.batch).WhoAmI(WhoAmIRequest(), metadata=ALICE)
    assert (found.identity, found.on_behalf_of) == ("service/batch", "user/alice")
    spec = WorkloadSpec(arguments=["SECRET"])
    created = WorkloadServiceStub(fleet.batch).CreateWorkload(
        CreateWorkloadRequest(spec=spec, request_id="same"), metadata=ALICE
    )
    assert created.workload.owner == "user/alice"
    assert (created.command.actor, created.command.on_behalf_of) == ("service/batch", "user/alice")
    fleet.worker.succeed("run")

    asked = GetWorkloadRequest(workload=created.workload.workload_id)
    for channel, metadata, sees in (
        (fleet.alice, (), True),
        (fleet.batch, ALICE, True),
        (fleet.batch, (), False),
    ):
        seen = WorkloadServiceStub(channel).GetWorkload(asked, metadata=metadata)
        command = GetCommandRequest(command_id=created.command.command_id)
        run = CommandServiceStub(channel).GetCommand(command, metadata=metadata)
        assert ("SECRET" in str(seen), "SECRET" in str(run)) == (sees, sees)
    with pytest.raises(grpc.RpcError) as error:
        WorkloadServiceStub(fleet.batch).StopWorkload(
            StopWorkloadRequest(workload=created.workload.workload_id)
        )
    assert cast("grpc.Call", error.value).code() is grpc.StatusCode.PERMISSION_DENIED
    own = WorkloadServiceStub(fleet.batch).CreateWorkload(CreateWorkloadRequest(spec=spec, request_id="same"))
    assert own.workload.owner == "service/batch", "request ids are of both identities"


def test_a_service_acts_for_no_other_user(fleet: Fleet) -> None:
    for channel, user, why in (
        (fleet.batch, "user/bob", "access grant on_behalf_of service/batch --users user/bob"),
        (fleet.alice, "user/alice", "only services act for users, and user/alice is none"),
    ):
        with pytest.raises(grpc.RpcError) as error:
            WorkloadServiceStub(channel).GetWorkload(
                GetWorkloadRequest(workload="any"), metadata=(("leasehold-on-behalf-of", user),)
            )
        refused = cast("grpc.Call", error.value)
        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
        assert why in (refused.details() or "")
    asked = ListAuditEntriesRequest(filter="outcome = REFUSED")
    expected = {("service/batch", "user/bob"), ("user/alice", "user/alice")}
    with grpc.insecure_channel(f"unix:{fleet.coordinator.folder / 'store.sock'}") as channel:
        audit = AuditServiceStub(channel)
        until(
            lambda: (
                expected
                <= {(one.identity, one.on_behalf_of) for one in audit.ListAuditEntries(asked).entries}
            )
        )
