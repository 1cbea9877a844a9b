"""A revocation is effective in memory even if the store can't be written."""

import asyncio
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


@pytest.mark.parametrize("is_refused", [False, True], ids=["stored", "refused by the disk"])
def test_a_block_during_an_unblock_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        revocations = Revocations(store, certificates)
        await revocations.block(ALICE)
        write, written, let_go = store.write, asyncio.Event(), asyncio.Event()

        async def write_slowly(*rows: Change) -> None:
            await write(*rows)
            if not written.is_set():
                written.set()
                await let_go.wait()
            elif is_refused:
                raise FULL

        with monkeypatch.context() as patch:
            patch.setattr(store, "write", write_slowly)
            unblocking = asyncio.create_task(revocations.unblock(ALICE))
            await written.wait()
            blocking = asyncio.create_task(revocations.block(ALICE))
            await asyncio.wait({blocking})
            let_go.set()
            await unblocking
        assert certificates.is_blocked(ALICE)
        assert isinstance(blocking.exception(), FleetError) == is_refused
        if not is_refused:
            assert {one.subject for one in await store.revocations()} == {"user/alice"}
        await revocations.unblock(ALICE)
        assert not certificates.is_blocked(ALICE)
        assert not await store.revocations()
        with pytest.raises(FleetError, match="is not blocked"):
            await revocations.unblock(ALICE)

    with_certificates(tmp_path, scenario)
