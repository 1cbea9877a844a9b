"""Client certificates are issued, stored and known together."""

import asyncio
import datetime
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from leasehold.v1 import errors_pb2
from leasehold_coordinator.access.authorities import open_authorities
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.certificates import CertificateRegistry, Revocation
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.client_certificates import KEPT_AFTER_EXPIRY, ClientCertificates
from leasehold_coordinator.fleet.live_calls import LiveCalls
from leasehold_coordinator.fleet.revocations import Revocations
from leasehold_coordinator.storage.rows import Change, revocation_row
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import unix_ns

WORKER, ALICE = Identity(Kind.WORKER, "gpu-07"), Identity(Kind.USER, "alice")
FULL = FleetError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "the disk is full")


def with_certificates(folder: Path, scenario: Callable[[Store, ClientCertificates], Awaitable[None]]) -> None:
    """Runs a scenario on the certificates of a store, as a start of the coordinator finds them."""

    async def run() -> None:
        store = Store.open(str(folder / "store.sqlite3"))
        try:
            certificates = ClientCertificates(store, open_authorities(folder), CertificateRegistry())
            await certificates.load()
            await scenario(store, certificates)
        finally:
            store.close()

    asyncio.run(run())


def new_key() -> ec.EllipticCurvePublicKey:
    return ec.generate_private_key(ec.SECP256R1()).public_key()


def test_certificates_are_known_after_a_new_start(tmp_path: Path) -> None:
    async def issue(store: Store, certificates: ClientCertificates) -> None:
        first = await certificates.issue(new_key(), WORKER)
        await certificates.issue(new_key(), WORKER, predecessor=first.serial)
        await certificates.issue(
            new_key(), ALICE, rows=[revocation_row(Revocation(str(WORKER), "local/root", 1))]
        )

    async def read(store: Store, certificates: ClientCertificates) -> None:
        registry = certificates.registry
        first, second = sorted(registry.of(WORKER), key=lambda one: one.predecessor)
        (alice,) = registry.of(ALICE)
        assert registry.get(first.serial) == registry.find(first.fingerprint) == first
        assert registry.successors(first.serial) == [second]
        assert registry.family(first.serial) == [first.serial, second.serial]
        assert registry.family(alice.serial) == [alice.serial]
        assert registry.expire_time(first, {first.authority}) == second.not_after
        assert registry.expire_time(first, {"ab"}) is None
        connection = WORKER, first.serial, first.not_after, first.not_after
        assert "is retired" in (registry.refusal(*connection, {"ab"}) or "")
        assert registry.is_revoked(str(WORKER)), "rows of the same transaction are stored"
        assert not registry.is_revoked(str(ALICE))
        with pytest.raises(FleetError, match="worker/gpu-07 is blocked") as refused:
            await certificates.issue(new_key(), WORKER)
        assert refused.value.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED

    with_certificates(tmp_path, issue)
    with_certificates(tmp_path, read)


def test_a_renewal_extends_the_session_of_a_worker_and_no_connection_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the holder of a copied key would keep a connection for as long as the owner renews."""
    days_ahead = 0
    monkeypatch.setattr(
        Store, "highest_time_ns", property(lambda _: time.time_ns() + days_ahead * 86_400 * 10**9)
    )

    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        nonlocal days_ahead
        ended: list[FleetError] = []
        calls = LiveCalls(certificates.refusal)

        async def connected(identity: Identity) -> Caller:
            """A caller whose certificate lives for 15 days, and is renewed."""
            issued = await certificates.issue(new_key(), identity)
            first = replace(issued, not_after=issued.not_after - datetime.timedelta(days=15))
            certificates.registry.add(first)
            await certificates.issue(new_key(), identity, predecessor=first.serial)
            return Caller(identity, "ipv4:192.0.2.1", serial=first.serial, expire_time=first.not_after)

        worker, alice = await connected(WORKER), await connected(ALICE)
        with calls.entered(worker, ended.append), calls.entered(alice, ended.append):
            calls.check()
            assert not ended, "an older certificate stays valid until its expiry"
            assert calls.counts() == {worker.serial: 1, alice.serial: 1}
            days_ahead = 20
            calls.check()
            (refusal,) = ended
            assert f"certificate {alice.serial} of user/alice has expired, and was renewed" in refusal.message
            assert refusal.reason == errors_pb2.ERROR_REASON_UNAUTHENTICATED
            assert refusal.retry_after_s is not None, "the client watches again, on a new connection"
            with pytest.raises(FleetError, match="was renewed"):
                calls.require(alice)
            assert calls.counts() == {worker.serial: 1}
            days_ahead = 31
            calls.check()
            assert f"certificate {worker.serial} of worker/gpu-07 expired" in ended[-1].message

    with_certificates(tmp_path, scenario)


def test_a_rotation_waits_for_nobody_who_is_blocked_revoked_or_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days_ahead = 0
    monkeypatch.setattr(
        Store, "highest_time_ns", property(lambda _: time.time_ns() + days_ahead * 86_400 * 10**9)
    )

    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        nonlocal days_ahead
        bob, carol = Identity(Kind.USER, "bob"), Identity(Kind.USER, "carol")
        issued = {one: await certificates.issue(new_key(), one) for one in (WORKER, ALICE, bob, carol)}
        certificates.authorities.add()
        assert certificates.waiting() == [WORKER, ALICE, bob, carol]
        certificates.confirm(carol, [certificates.authorities.newest.serial])
        revocations = Revocations(store, certificates)
        await revocations.block(ALICE)
        assert certificates.waiting() == [WORKER, bob]
        await revocations.revoke(issued[bob].serial)
        assert certificates.waiting() == [WORKER]
        days_ahead = 31
        assert certificates.waiting() == []

    with_certificates(tmp_path, scenario)


def test_a_certificate_that_is_not_stored_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        first = await certificates.issue(new_key(), WORKER)

        async def write(*rows: Change) -> None:
            raise FULL

        monkeypatch.setattr(store, "write", write)
        with pytest.raises(FleetError, match="the disk is full"):
            await certificates.issue(new_key(), WORKER, replaced=[first.serial])
        assert certificates.registry.of(WORKER) == [first]
        assert not certificates.registry.is_revoked(first.serial)

    with_certificates(tmp_path, scenario)


def test_a_replaced_certificate_is_revoked_with_the_issue(tmp_path: Path) -> None:
    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        first = await certificates.issue(new_key(), WORKER)
        second = await certificates.issue(new_key(), WORKER, replaced=[first.serial])
        assert certificates.registry.is_revoked(first.serial)
        assert [one.subject for one in await store.revocations()] == [first.serial]
        assert not certificates.registry.is_revoked(second.serial)

    with_certificates(tmp_path, scenario)


def test_the_highest_time_survives_a_clock_that_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    back_ns = int(datetime.timedelta(days=1).total_seconds()) * 10**9

    async def note(store: Store, certificates: ClientCertificates) -> None:
        await certificates.issue(new_key(), WORKER)
        seen.append(store.highest_time_ns)

    with_certificates(tmp_path, note)
    now_ns = seen[0]
    monkeypatch.setattr("leasehold_coordinator.storage.store.time.time_ns", lambda: now_ns - back_ns)
    with_certificates(tmp_path, note)
    assert seen[1] >= now_ns - 10**9


def test_certificates_that_expired_long_ago_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        first = await certificates.issue(new_key(), WORKER)
        second = await certificates.issue(new_key(), WORKER, predecessor=first.serial)
        third = await certificates.issue(new_key(), WORKER, replaced=[first.serial])
        await certificates.prune()
        assert certificates.registry.of(WORKER) == [first, second, third]
        later_ns = unix_ns(third.not_after + KEPT_AFTER_EXPIRY) + 1000
        monkeypatch.setattr("leasehold_coordinator.storage.store.time.time_ns", lambda: later_ns)
        await certificates.prune()
        registry = certificates.registry
        assert registry.of(WORKER) == await store.certificates() == []
        assert await store.revocations() == []
        assert (registry.get(first.serial), registry.find(first.fingerprint)) == (None, None)
        assert registry.successors(first.serial) == []
        assert not registry.is_revoked(first.serial)

    with_certificates(tmp_path, scenario)


def test_a_certificate_does_not_escape_the_revocation_of_the_one_it_renews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store, certificates: ClientCertificates) -> None:
        first = await certificates.issue(new_key(), WORKER)
        revocations, write_now = Revocations(store, certificates), store.write

        async def write(*rows: Change) -> None:
            monkeypatch.setattr(store, "write", write_now)
            await revocations.revoke(first.serial)
            await write_now(*rows)

        monkeypatch.setattr(store, "write", write)
        with pytest.raises(FleetError, match="is revoked, and can't be renewed"):
            await certificates.issue(new_key(), WORKER, predecessor=first.serial)
        (second,) = certificates.registry.successors(first.serial)
        assert certificates.registry.is_revoked(second.serial)
        assert {one.subject for one in await store.revocations()} == {first.serial, second.serial}
        with pytest.raises(FleetError, match="is revoked, and can't be renewed"):
            await certificates.issue(new_key(), WORKER, predecessor=first.serial)

    with_certificates(tmp_path, scenario)
