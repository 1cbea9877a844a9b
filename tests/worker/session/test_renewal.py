"""The worker's certificate is renewed when it is due, by one key until the answer is there."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import NAME, Enrolment
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.session import renewal
from leasehold_worker.session.client_keys import require_valid, validity_s
from leasehold_worker.session.enrolment import RefusedError, renew
from leasehold_worker.session.renewal import Renewal
from msgspec import structs

from tests.certificates import issue
from tests.renewals import Renewals, serving_renewals


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Renewals]:
    """A coordinator that renews."""
    with serving_renewals(tmp_path) as serving:
        yield serving


@pytest.fixture
def state(coordinator: Renewals, tmp_path: Path) -> StateDirectory:
    """The state directory of a worker whose certificate is due."""
    holder = coordinator.issue("worker/alpha")
    directory = StateDirectory(tmp_path)
    directory.save_enrolment(
        Enrolment(
            identity="worker/alpha",
            coordinator=coordinator.address,
            key=holder.key.decode(),
            certificate=holder.chain.decode(),
            authorities=holder.roots.decode(),
            renew_s=time.time() - 1,
        )
    )
    return directory


def kept(state: StateDirectory) -> Enrolment:
    """What the worker keeps."""
    enrolment = state.enrolment()
    assert enrolment is not None
    return enrolment


def test_a_certificate_that_is_due_is_renewed(coordinator: Renewals, state: StateDirectory) -> None:
    before = kept(state)

    async def run() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Renewal(state, coordinator.address).run)
                while kept(state).certificate == before.certificate:  # noqa: ASYNC110 - a file tells nobody
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(run)
    after = kept(state)
    assert after.key != before.key
    assert after.renew_s > time.time()
    assert len(coordinator.keys) == 1
    require_valid(after)


def test_the_validity_of_a_renewed_certificate_is_known_at_once(
    coordinator: Renewals, state: StateDirectory
) -> None:
    """A gauge with the validity of the replaced certificate would raise an alert days after the renewal."""
    coordinator.renew_time = datetime.now(UTC) + timedelta(days=10)  # so the worker sleeps after the renewal
    old = issue(coordinator.authority, "worker/alpha", life=timedelta(days=1))
    certificate = old.chain.decode()
    state.save_enrolment(structs.replace(kept(state), key=old.key.decode(), certificate=certificate))
    renewing = Renewal(state, coordinator.address)

    async def run() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(renewing.run)
                while renewing.validity_s in (None, validity_s(old.chain)):  # noqa: ASYNC110 - nobody notifies
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(run)
    assert renewing.validity_s == validity_s(kept(state).certificate.encode())


def test_a_lost_answer_is_asked_for_again_with_the_same_key(
    coordinator: Renewals, state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "RETRY_S", (0.0, 0.01))
    coordinator.losing = 2
    before = kept(state)

    async def run() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Renewal(state, coordinator.address).run)
                while kept(state).certificate == before.certificate:  # noqa: ASYNC110 - a file tells nobody
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(run)
    assert len(coordinator.keys) == 3
    assert len(set(coordinator.keys)) == 1


def test_a_clock_that_is_ahead_causes_no_flood_of_renewals(
    coordinator: Renewals, state: StateDirectory
) -> None:
    """By such a clock, a new certificate is due at once."""
    coordinator.renew_time = datetime.now(UTC) - timedelta(days=1)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Renewal(state, coordinator.address).run)
            with trio.fail_after(30):
                while not coordinator.keys:  # noqa: ASYNC110 - a file tells nobody
                    await trio.sleep(0.01)
            await trio.sleep(0.5)
            nursery.cancel_scope.cancel()

    trio.run(run)
    assert len(coordinator.keys) == 1


def test_a_refused_renewal_keeps_the_certificate(coordinator: Renewals, state: StateDirectory) -> None:
    before = kept(state)
    coordinator.refusing = True
    with pytest.raises(RefusedError, match="two hosts have the certificate") as refusal:
        renew(state, coordinator.address)
    assert refusal.value.is_final
    assert kept(state).certificate == before.certificate


def test_a_key_that_others_can_read_is_refused(state: StateDirectory, tmp_path: Path) -> None:
    (tmp_path / NAME).chmod(0o644)
    with pytest.raises(StartError, match="others may have its key"):
        state.enrolment()
