"""A client with a context renews its certificate when it is due, and goes on with the new one."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from leasehold_client.config import config_path
from leasehold_client.contexts import FILE, Context, Contexts, locked_contexts, read_contexts
from leasehold_client.coordinator import login
from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.renewing_channel import context_credentials
from leasehold_client.errors import LeaseholdError, UsageError

from tests.renewals import Renewals, serving_renewals


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Renewals]:
    """A coordinator that renews, and the current context of a user whose certificate is due."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with serving_renewals(tmp_path) as serving:
        holder = serving.issue("user/alice")
        context = Context(
            "alice",
            "user/alice",
            coordinator=serving.address,
            key=holder.key.decode(),
            certificate=holder.chain.decode(),
            authorities=holder.roots.decode(),
            expire_s=time.time() + 1000,
            renew_s=time.time() - 1,
        )
        with locked_contexts() as write:
            write(Contexts("alice", {"alice": context}))
        yield serving


def change(**fields: float) -> None:
    """Changes the context."""
    with locked_contexts() as write:
        contexts = read_contexts()
        write(contexts.put(replace(contexts.get("alice"), **fields)))  # type: ignore[arg-type]


def test_a_client_renews_and_calls_with_the_new_certificate(coordinator: Renewals) -> None:
    change(renew_s=time.time() + 1000)
    with Client() as client:
        client.workers()
        change(renew_s=time.time() - 1)
        client._connection.channel._context._context = read_contexts().get("alice")  # type: ignore[attr-defined]
        client.workers()
        client.workers()
    first, second, third = coordinator.callers
    assert first != second == third
    assert len(coordinator.keys) == 1
    assert read_contexts().get("alice").renew_s > time.time()


def test_a_channel_that_cannot_be_opened_is_opened_by_the_next_call(
    coordinator: Renewals, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(renew_s=time.time() + 1000)
    with Client() as client:
        client.workers()
        change(renew_s=time.time() - 1)
        client._connection.channel._context._context = read_contexts().get("alice")  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(grpc, "ssl_channel_credentials", refuse_new(grpc.ssl_channel_credentials))
            with pytest.raises(MemoryError):
                client.workers()
        client.workers()
    first, second = coordinator.callers
    assert first != second


def refuse_new(real: Callable[..., grpc.ChannelCredentials]) -> Callable[..., grpc.ChannelCredentials]:
    """Credentials of the old certificate, by which a renewal is asked for, and then an error."""
    found: list[object] = []

    def credentials(*texts: bytes) -> grpc.ChannelCredentials:
        found.append(texts)
        if len(found) > 1:
            raise MemoryError
        return real(*texts)

    return credentials


def test_a_renewal_by_another_process_is_taken_over(coordinator: Renewals) -> None:
    stale = read_contexts().get("alice")
    with Client() as client:
        client._connection.channel._context._context = stale  # type: ignore[attr-defined]
        client.workers()
    assert len(coordinator.keys) == 1


def test_a_renewal_by_another_process_is_taken_over_after_the_expiry(coordinator: Renewals) -> None:
    change(renew_s=time.time() + 900)
    old = read_contexts().get("alice")
    with Client() as client:
        client.workers()
        login.renew("alice", old.certificate)
        client._connection.channel._context._context = replace(old, expire_s=time.time() - 1)  # type: ignore[attr-defined]
        client.workers()
    first, second = coordinator.callers
    assert first != second


def test_a_watch_without_changes_renews_its_certificate_in_time(coordinator: Renewals) -> None:
    change(expire_s=time.time() + 2.5, renew_s=time.time() + 0.5)
    with Client() as client, closing(client.watch_fleet()) as watch:
        next(watch)
        assert coordinator.keys == []
        next(watch)
    first, second = coordinator.callers
    assert first != second
    assert len(coordinator.keys) == 1


def test_a_watch_that_cannot_renew_lasts_until_its_certificate_expires(coordinator: Renewals) -> None:
    coordinator.refusing = True
    change(expire_s=time.time() + 2.0, renew_s=time.time() + 0.5)
    with Client() as client, pytest.raises(LeaseholdError, match="the certificate expired"):
        list(client.watch_fleet())
    assert 2 <= len(coordinator.callers) <= 4


def test_a_watch_takes_over_a_certificate_of_another_process(coordinator: Renewals) -> None:
    change(renew_s=time.time() + 900)
    with Client() as client, closing(client.watch_fleet()) as watch:
        next(watch)
        login.renew("alice", read_contexts().get("alice").certificate)
        coordinator.watch_end.set()
        next(watch)
        first, second = coordinator.callers
        assert first != second
        coordinator.watch_end.set()
        with pytest.raises(LeaseholdError, match="the certificate expired"):
            next(watch)
    assert len(coordinator.callers) == 2


def test_a_context_of_somebody_else_is_not_taken_over(coordinator: Renewals) -> None:
    change(renew_s=time.time() + 900)
    with Client() as client, closing(client.watch_fleet()) as watch:
        next(watch)
        with locked_contexts() as write:
            other = replace(read_contexts().get("alice"), identity="user/bob", certificate="")
            write(read_contexts().put(other))
        coordinator.watch_end.set()
        with pytest.raises(LeaseholdError, match="the certificate expired"):
            next(watch)


def test_a_renewal_does_not_turn_an_open_client_into_somebody_else(coordinator: Renewals) -> None:
    change(renew_s=time.time() + 900)
    own = read_contexts().get("alice")
    with Client() as client:
        client.workers()
        bob = coordinator.issue("user/bob")
        other = replace(own, identity="user/bob", key=bob.key.decode(), certificate=bob.chain.decode())
        with locked_contexts() as write:
            write(read_contexts().put(other))
        client._connection.channel._context._context = replace(own, renew_s=time.time() - 1)  # type: ignore[attr-defined]
        client.workers()
    first, second = coordinator.callers
    assert first == second
    assert coordinator.keys == []


def test_a_coordinator_that_does_not_renew_stops_no_call(coordinator: Renewals) -> None:
    coordinator.losing = 100
    with Client() as client:
        client.workers()
        client.workers()
    assert len(coordinator.keys) == 1, "the next attempt is a minute later"
    with Client() as client:
        client.workers()
    assert len(set(coordinator.keys)) == 1, "a lost answer is asked for again with the same key"


def test_an_expired_certificate_is_told_with_its_remedy(coordinator: Renewals) -> None:
    change(expire_s=time.time() - 3 * 86_400)
    with pytest.raises(UsageError, match=r"expired 3 days ago.*token create --user alice --replace"):
        Client()
    change(expire_s=time.time() + 1000, renew_s=time.time() + 900, begin_s=time.time() + 7200)
    with pytest.raises(UsageError, match=r"valid in 1 hour only.*the clock is behind"):
        Client()


def test_an_address_leaves_out_the_current_context(coordinator: Renewals) -> None:
    with pytest.raises(UsageError, match="no context is named 'bob'"):
        Client(context="bob")
    with Client(coordinator.address, context="alice") as client:
        client.workers()
    assert len(coordinator.callers) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", '{"current": 1, "contexts": {}}', '{"current": "", "contexts": {"a": {"x": 1}}}']
)
def test_a_damaged_file_is_told(coordinator: Renewals, text: str) -> None:
    path = config_path().with_name(FILE)
    path.write_text(text)
    with pytest.raises(UsageError, match="is damaged"):
        read_contexts()
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match="others may have the keys"):
        read_contexts()


@pytest.mark.parametrize("field", ["key", "certificate", "authorities"])
def test_a_damaged_context_is_refused_before_grpc_logs_it(
    coordinator: Renewals, capfd: pytest.CaptureFixture[str], field: str
) -> None:
    holder = coordinator.issue("user/bob")
    whole = Context(
        "bob",
        "user/bob",
        key=holder.key.decode(),
        certificate=holder.chain.decode(),
        authorities=holder.roots.decode(),
    )
    context_credentials(whole)
    cut = getattr(whole, field)[:100]
    damaged = replace(whole, **{field: cut})
    with pytest.raises(UsageError, match="of the context bob is damaged: `leasehold context delete bob`"):
        context_credentials(damaged)
    assert capfd.readouterr().err == ""
