"""Changes of role bindings that overlap."""

import asyncio
from pathlib import Path

import pytest
from leasehold.v1 import access_service_pb2, errors_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.binding_changes import BindingChanges
from leasehold_coordinator.fleet.callers import note_caller
from leasehold_coordinator.storage.rows import Change
from leasehold_coordinator.storage.store import Store

from tests.coordinator.bench import Gate
from tests.coordinator.storage.test_store import with_store

EVE = Identity(Kind.USER, "eve")


def admin(name: str) -> RoleBinding:
    return RoleBinding(identity=f"user/{name}", role=access_service_pb2.ROLE_ADMIN)


def test_a_grant_that_waited_for_the_revocation_of_its_caller_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store) -> None:
        bindings = Bindings()
        bindings.load([admin("boss"), admin("eve")])
        changes = BindingChanges(store, bindings, lambda: None)
        gate, write_now = Gate(), store.write

        async def write(*rows: Change) -> None:
            await gate()
            await write_now(*rows)

        monkeypatch.setattr(store, "write", write)
        note_caller(Caller(Identity(Kind.USER, "boss"), "", role=Role.ADMIN))
        revoking = asyncio.create_task(changes.revoke(admin("eve")))
        await gate.reached.wait()
        note_caller(Caller(EVE, "", role=Role.ADMIN))
        granting = asyncio.create_task(changes.grant(admin("mallory")))
        await asyncio.sleep(0)
        gate.opened.set()
        await revoking
        with pytest.raises(FleetError, match="no admin any more") as refusal:
            await granting
        assert refusal.value.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
        assert [one.identity for one in bindings.all()] == ["user/boss"]

    with_store(tmp_path / "store.sqlite3", scenario)
