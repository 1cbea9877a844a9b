"""Certificates that live for seconds: what they end, and what goes on."""

import json
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from leasehold_client.contexts import read_contexts
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError

from tests.integration.fleets import Fleet, make_fleet
from tests.integration.test_enrolment import by_context, join, login, set_directories

LIFE_S = 16

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator whose client certificates live for some seconds."""
    folder = tmp_path_factory.mktemp("renewal")
    with pytest.MonkeyPatch.context() as patch:
        set_directories(folder, patch)
        settings = folder / "coordinator.toml"
        days = f"client_certificate_days = {LIFE_S / 86_400}\n"
        settings.write_text(f'server_names = ["localhost"]\n{days}')
        listen = ("--listen", "0.0.0.0:0", "--worker-listen", "0.0.0.0:0", "--config", str(settings))
        with make_fleet(folder, *listen) as started:
            started.address = f"unix:{folder / 'store.sock'}"
            yield started


def certificate(fleet: Fleet, name: str) -> str:
    """The present certificate of a worker."""
    kept = json.loads((fleet.folder / name / "enrolment.json").read_text())
    return str(kept["certificate"])


def test_sessions_and_clients_outlive_their_certificates(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LEASEHOLD_COORDINATOR", raising=False)
    join(fleet, "gpu-01")
    login(fleet, "user/alice")
    fleet.cli("access", "grant", "viewer", "user/alice")
    first, began = certificate(fleet, "gpu-01"), time.monotonic()
    with Client(context="alice") as client:
        watch = client.watch_fleet()
        while not next(watch).bookmark.snapshot_end:
            pass
        while time.monotonic() - began < 1.5 * LIFE_S:
            assert [worker.name for worker in client.workers()] == ["gpu-01"]
            time.sleep(0.5)
        fleet.cli("cordon", "gpu-01", "--reason", "a test")
        assert any(response.worker.cordon.reason == "a test" for response in watch)
        fleet.cli("uncordon", "gpu-01")
    assert certificate(fleet, "gpu-01") != first
    log = fleet.log("gpu-01")
    assert log.count("connected to") == 1, log
    assert "renewed the certificate of worker/gpu-01" in log
    fleet.run_counter("one", "gpu-01")
    fleet.cli("stop", "one")
    assert "user/alice" in by_context(fleet, "whoami")


def test_a_watch_that_is_the_only_use_outlives_its_certificate(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LEASEHOLD_COORDINATOR", raising=False)
    join(fleet, "gpu-03")
    login(fleet, "user/carol")
    fleet.cli("access", "grant", "viewer", "user/carol")
    first = read_contexts().get("carol")
    cordon = threading.Timer(1.5 * LIFE_S, fleet.cli, ("cordon", "gpu-03", "--reason", "a later test"))
    with Client(context="carol") as client:
        cordon.start()
        assert any(response.worker.cordon.reason == "a later test" for response in client.watch_fleet())
    cordon.join()
    fleet.cli("uncordon", "gpu-03")
    assert read_contexts().get("carol").expire_s > first.expire_s + 0.4 * LIFE_S


def test_who_was_away_for_too_long_joins_again(fleet: Fleet) -> None:
    join(fleet, "gpu-02")
    login(fleet, "user/bob")
    (before,) = (worker.worker_id for worker in fleet.client.workers() if worker.name == "gpu-02")
    fleet.end("gpu-02", signal.SIGTERM)
    time.sleep(LIFE_S + 1)
    fleet.join_worker("gpu-02")
    fleet.wait(lambda: "the certificate of worker/gpu-02 expired" in fleet.log("gpu-02"))
    assert "`leasehold token create --worker gpu-02 --replace`" in fleet.log("gpu-02")
    assert "expired" in by_context(fleet, "whoami", "--context", "bob", code=2)
    with pytest.raises(LeaseholdError, match="token create --user bob --replace"):
        Client(context="bob")
    fleet.end("gpu-02", signal.SIGTERM)
    join(fleet, "gpu-02", "--replace")
    assert [worker.worker_id for worker in fleet.client.workers() if worker.name == "gpu-02"] == [before]
