"""Refusals in the audit: all of them are counted, and nobody can fill the disk with them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_ALLOWED
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import audit_refusals
from leasehold_coordinator.fleet.audit_entries import TEXT_LIMIT
from leasehold_coordinator.fleet.audit_refusals import (
    BOUNDS,
    CALLER_LIMIT,
    ENTRY_BURST,
    FAILURES,
    METHOD_LIMIT,
    MORE,
    OTHER_METHODS,
    OTHERS,
    RESOURCE_LIMIT,
    RIGHTS,
    AuditRefusals,
)
from leasehold_coordinator.shielded_tasks import settle
from leasehold_coordinator.storage.rows import Change
from leasehold_coordinator.storage.store import Store

from tests.coordinator.bench import FULL, Gate
from tests.coordinator.storage.test_audit_chain import is_whole, listed
from tests.coordinator.storage.test_store import Clock, with_store

REFUSAL = FleetError(errors_pb2.ERROR_REASON_NOT_PERMITTED, "no role")
METHOD = "/leasehold.v1.FleetService/DeleteWorker"
HOST = "ipv4:192.0.2.1"


def test_a_callers_refusals_are_one_entry_per_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    alice = Caller(Identity(Kind.SERVICE, "batch"), HOST, on_behalf_of=Identity(Kind.USER, "alice"))

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for wanted in (3, 5):
            for _ in range(wanted):
                refusals.note(REFUSAL, METHOD, HOST, caller=alice)
            await refusals.flush()
            refusals.note(FULL, METHOD, HOST, caller=alice)
            refusals.note(REFUSAL, METHOD, HOST, caller=alice)
            await refusals.flush()
            clock.served_s += 30
            await refusals.flush()
            clock.served_s += 31
            await refusals.flush()
            clock.served_s += 61
            await refusals.flush()
        entries = await listed(store)
        assert [entry.count for entry in entries] == [3, 1, 5, 1]
        assert {(entry.identity, entry.on_behalf_of, entry.address) for entry in entries} == {
            ("service/batch", "user/alice", HOST)
        }
        assert {(entry.method, entry.message, entry.reason) for entry in entries} == {
            (METHOD, "no role", errors_pb2.ERROR_REASON_NOT_PERMITTED)
        }
        assert not any(refusals._callers.values())

    with_store(tmp_path / "store.sqlite3", scenario)


def test_each_method_and_each_user_has_an_entry_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    bob = Caller(Identity(Kind.USER, "bob"), HOST)
    batch = Caller(Identity(Kind.SERVICE, "batch"), HOST)

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for number in range(3 * METHOD_LIMIT):
            refusals.note(REFUSAL, f"/method/{number}", HOST, caller=bob)
        for user in ("alice", "ann"):
            acting = replace(batch, on_behalf_of=Identity(Kind.USER, user))
            refusals.note(REFUSAL, METHOD, HOST, caller=acting)
        await refusals.flush()
        found = {
            (entry.identity, entry.on_behalf_of, entry.method): entry.count for entry in await listed(store)
        }
        assert len(found) == METHOD_LIMIT + 1 + 2
        assert found["user/bob", "", OTHER_METHODS] == 2 * METHOD_LIMIT
        assert {user for identity, user, _ in found if identity == "service/batch"} == {
            "user/alice",
            "user/ann",
        }
        clock.served_s += 61
        await refusals.flush()
        assert not any(refusals._callers.values())

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_caller_of_many_methods_does_not_delay_the_entries_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_refusals, "ENTRY_BURST", 2)

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for name, methods in (("bob", METHOD_LIMIT), ("carol", 1)):
            caller = Caller(Identity(Kind.USER, name), HOST)
            for number in range(methods):
                refusals.note(REFUSAL, f"/method/{number}", HOST, caller=caller)
        await refusals.flush()
        assert {entry.identity for entry in await listed(store)} == {"user/bob", "user/carol"}

    with_store(tmp_path / "store.sqlite3", scenario)


def test_the_entry_that_waited_longest_is_stored_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the rate of entries, no entry waits for ever for those of other callers and methods."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(audit_refusals, "ENTRY_BURST", 1)
    bob = Caller(Identity(Kind.USER, "bob"), HOST)
    flooding = [Caller(Identity(Kind.USER, f"m{number}"), HOST) for number in range(16)]

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for second in range(300):
            for caller in flooding:
                refusals.note(REFUSAL, METHOD, HOST, caller=caller)
            refusals.note(REFUSAL, "/method/always", HOST, caller=bob)
            if second == 10:
                refusals.note(REFUSAL, "/method/once", HOST, caller=bob)
            await refusals.flush()
            clock.served_s += 1
        entries = [entry for entry in await listed(store) if entry.identity == "user/bob"]
        assert {entry.method for entry in entries} == {"/method/always", "/method/once"}

    with_store(tmp_path / "store.sqlite3", scenario)


@pytest.mark.long
def test_many_callers_take_bounded_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, minutes, hosts = Clock(monkeypatch), 30, 500

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for minute in range(minutes):
            for number in range(hosts):
                refusals.note(REFUSAL, METHOD, f"ipv6:[2001:db8::{minute:x}:{number:x}]")
            assert all(len(callers) <= CALLER_LIMIT + 1 for callers in refusals._callers.values())
            await refusals.flush()
            clock.served_s += 61
        await refusals.flush(is_last=True)
        entries = await listed(store)
        assert sum(entry.count for entry in entries) == minutes * hosts
        assert len(entries) <= ENTRY_BURST + 9 * minutes + CALLER_LIMIT + 1
        assert OTHERS in {entry.address for entry in entries}
        assert await is_whole(store)

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_full_disk_loses_no_count_and_no_resource(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)

        async def fail(*rows: object) -> None:
            refusals.note(REFUSAL, METHOD, HOST, resources=["worker/late"])  # while the disk is slow
            raise FULL

        refusals.note(REFUSAL, METHOD, HOST, resources=["worker/early"])
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", fail)
            with pytest.raises(FleetError):
                await refusals.flush()
        await refusals.flush()
        (entry,) = await listed(store)
        assert (entry.count, entry.resource) == (2, "worker/early, worker/late")

    with_store(tmp_path / "store.sqlite3", scenario)


@pytest.mark.parametrize("error", [None, FULL])
def test_a_cancelled_flush_loses_no_count_and_counts_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: FleetError | None
) -> None:
    async def scenario(store: Store) -> None:
        refusals, gate, write_now = AuditRefusals(store), Gate(), store.write

        async def write(*rows: Change) -> None:
            await gate()
            if error is not None:
                raise error
            await write_now(*rows)

        refusals.note(REFUSAL, METHOD, HOST, resources=["worker/early"])
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", write)
            flushing = asyncio.create_task(refusals.flush())
            await gate.reached.wait()
            flushing.cancel()
            await asyncio.wait({flushing})
            assert flushing.cancelled()
            gate.opened.set()
            await settle()
        await refusals.flush(is_last=True)
        (entry,) = await listed(store)
        assert (entry.count, entry.resource) == (1, "worker/early")

    with_store(tmp_path / "store.sqlite3", scenario)


def test_texts_of_callers_are_cut(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        refusals.note(REFUSAL, "/" * 100_000, HOST, resources=["x" * 100_000])
        await refusals.flush()
        (entry,) = await listed(store)
        assert entry.ByteSize() < 1_000
        assert len(entry.method) == len(entry.resource) == TEXT_LIMIT

    with_store(tmp_path / "store.sqlite3", scenario)


def test_an_entry_names_the_first_resources_of_its_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)

        def note(*resources: str) -> None:
            refusals.note(REFUSAL, METHOD, HOST, resources=resources)

        note("worker/a", "worker/b")
        note("worker/a")
        note()
        await refusals.flush()
        clock.served_s += 61
        for number in range(1000):
            note(f"worker/{number}")
        await refusals.flush()
        clock.served_s += 61
        for number in range(3):
            note(f"worker/{number}{'x' * 100}")
        await refusals.flush()
        first, many, long = await listed(store)
        assert (first.resource, first.count) == ("worker/a, worker/b", 3)
        assert many.resource == ", ".join([*(f"worker/{number}" for number in range(RESOURCE_LIMIT)), MORE])
        assert many.count == 1000
        assert long.resource == f"worker/0{'x' * 100}, worker/1{'x' * 100}, {MORE}"
        assert len(long.resource) <= TEXT_LIMIT

    with_store(tmp_path / "store.sqlite3", scenario)


def test_resources_have_no_control_characters_and_no_commas(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        error = FleetError(errors_pb2.ERROR_REASON_NOT_PERMITTED, "no\x1b[2J")
        refusals.note(error, METHOD, HOST, resources=["worker/a\n\x1b[2J, worker/b", "\u202e" * 256])
        await refusals.flush()
        (entry,) = await listed(store)
        assert entry.resource == f"worker/a\\n\\x1b[2J\\x2c worker/b, {MORE}"
        assert entry.message == "no\\x1b[2J"

    with_store(tmp_path / "store.sqlite3", scenario)


def test_logins_are_counted_by_identity_whatever_addresses_without_one_do(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for number in range(10 * ENTRY_BURST):
            refusals.note(REFUSAL, METHOD, f"ipv6:[2001:db8::{number:x}]")
            if number % ENTRY_BURST == 0:
                await refusals.flush(is_last=True)
        for _ in range(3):
            refusals.note_login(Caller(Identity(Kind.USER, "alice"), HOST))
        await refusals.flush()
        (login,) = [entry for entry in await listed(store) if entry.identity]
        assert (login.identity, login.address, login.method, login.count) == ("user/alice", HOST, "login", 3)
        assert login.outcome == AUDIT_OUTCOME_ALLOWED

    with_store(tmp_path / "store.sqlite3", scenario)


def refusal(reason: ErrorReason.ValueType) -> FleetError:
    """A refusal for a reason."""
    return FleetError(reason, ErrorReason.Name(reason))


@pytest.mark.parametrize("method", [METHOD, "/leasehold.v1.FleetService/GetWorker"])
def test_a_change_has_an_entry_of_every_refusal_and_a_read_of_rights_and_bounds(
    tmp_path: Path, method: str
) -> None:
    alice = Caller(Identity(Kind.USER, "alice"), HOST)
    reasons = set(ErrorReason.values()) - {errors_pb2.ERROR_REASON_UNSPECIFIED}

    async def scenario(store: Store) -> None:
        for caller in (alice, None):
            refusals = AuditRefusals(store)
            for reason in sorted(reasons):
                refusals.note(refusal(reason), method, HOST, caller=caller)
            await refusals.flush(is_last=True)
        entries = await listed(store)
        known = {entry.reason for entry in entries if entry.identity}
        expected = RIGHTS | BOUNDS if method != METHOD else reasons - FAILURES
        assert known == expected
        assert {entry.reason for entry in entries if not entry.identity} == RIGHTS, "nobody knows who it was"
        for entry in entries:
            assert entry.message == ErrorReason.Name(entry.reason), "no reason stands for another"

    assert not FAILURES & (RIGHTS | BOUNDS)
    with_store(tmp_path / "store.sqlite3", scenario)


def test_every_bound_of_the_coordinator_is_known() -> None:
    named = {reason for reason in ErrorReason.values() if "TOO_MANY" in ErrorReason.Name(reason)}
    assert named == BOUNDS


def test_a_flood_of_invalid_requests_hides_no_refusal_for_lack_of_a_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the same caller and method, nor of others: places, entries and time are apart."""
    clock = Clock(monkeypatch)
    invalid = refusal(errors_pb2.ERROR_REASON_INVALID_ARGUMENT)
    mallory = Caller(Identity(Kind.USER, "mallory"), HOST)

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for minute in range(20):
            for number in range(2 * CALLER_LIMIT):
                flooding = Caller(Identity(Kind.USER, f"m{minute}-{number}"), HOST)
                refusals.note(invalid, METHOD, HOST, caller=flooding)
            for number in range(2 * METHOD_LIMIT):
                refusals.note(invalid, f"{METHOD}{number}", HOST, caller=mallory)
            for _ in range(1000):
                refusals.note(invalid, METHOD, HOST, caller=mallory)
            await refusals.flush()
            clock.served_s += 61
        refusals.note(invalid, METHOD, HOST, caller=mallory)
        refusals.note(REFUSAL, METHOD, HOST, caller=mallory, resources=["worker/alpha"])
        await refusals.flush()
        (entry,) = [one for one in await listed(store) if one.reason in RIGHTS]
        assert (entry.identity, entry.method, entry.count) == ("user/mallory", METHOD, 1)
        assert (entry.message, entry.resource) == ("no role", "worker/alpha")

    with_store(tmp_path / "store.sqlite3", scenario)


def test_the_entries_of_other_refusals_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, minutes, callers = Clock(monkeypatch), 30, 200
    reasons = sorted(set(ErrorReason.values()) - RIGHTS - FAILURES)[1:5]

    async def scenario(store: Store) -> None:
        refusals = AuditRefusals(store)
        for _ in range(minutes):
            for number in range(callers):
                caller = Caller(Identity(Kind.USER, f"u{number}"), HOST)
                for reason in reasons:
                    refusals.note(refusal(reason), METHOD, HOST, caller=caller)
            await refusals.flush()
            clock.served_s += 61
        assert len(await listed(store)) <= ENTRY_BURST + 9 * minutes
        await refusals.flush(is_last=True)
        entries = await listed(store)
        assert sum(entry.count for entry in entries) == minutes * callers * len(reasons)
        for reason in reasons:
            counted = sum(entry.count for entry in entries if entry.reason == reason)
            assert counted == minutes * callers

    with_store(tmp_path / "store.sqlite3", scenario)
