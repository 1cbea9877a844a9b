"""A revocation is effective in memory even if the store can't be written."""

from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.revocations import Revocations
from leasehold_coordinator.storage.rows import Change
from leasehold_coordinator.storage.store import Store

from tests.coordinator.fleet.test_client_certificates import ALICE, FULL, WORKER, new_key, with_certificates


def test_a_full_disk_keeps_nobody_from_being_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        issued = await certificates.issue(new_key(), WORKER)
        revocations = Revocations(store, certificates)

        async def write(*rows: Change) -> None:
            raise FULL

        with monkeypatch.context() as patch:
            patch.setattr(store, "write", write)
            for work in (revocations.revoke(issued.serial), revocations.block(ALICE)):
                with pytest.raises(FleetError, match="only until the coordinator restarts") as error:
                    await work
                assert error.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
            assert certificates.registry.is_revoked(issued.serial)
            assert certificates.is_blocked(ALICE)
            with pytest.raises(FleetError, match="the disk is full"):
                await revocations.unblock(ALICE)
            assert certificates.is_blocked(ALICE)
        assert not await store.revocations()
        await revocations.revoke(issued.serial)
        await revocations.block(ALICE)
        assert {one.subject for one in await store.revocations()} == {issued.serial, "user/alice"}

    with_certificates(tmp_path, scenario)


def test_blocks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold_coordinator.fleet.revocations.BLOCK_LIMIT", 1)

    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        revocations = Revocations(store, certificates)
        await revocations.block(ALICE)
        await revocations.block(ALICE)
        with pytest.raises(FleetError, match="which is the limit"):
            await revocations.block(WORKER)

    with_certificates(tmp_path, scenario)
