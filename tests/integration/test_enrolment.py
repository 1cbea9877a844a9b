"""A coordinator off loopback: who gets a join token, and what it is worth."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.worker.v1.session_pb2 import ConnectRequest, Hello

from tests.coordinator.commands.test_enrolment import read_ticket
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.integration.fleets import Fleet, make_fleet

SETTINGS = 'server_names = ["localhost"]\n'


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator that other hosts reach, with directories of its own. Verbs use its socket."""
    folder = tmp_path_factory.mktemp("enrolment")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME"):
            (folder / name).mkdir(mode=0o700)
            patch.setenv(name, str(folder / name))
        settings = folder / "coordinator.toml"
        settings.write_text(SETTINGS)
        listen = ("--listen", "0.0.0.0:0", "--worker-listen", "0.0.0.0:0", "--config", str(settings))
        with make_fleet(folder, *listen) as started:
            started.address = f"unix:{folder / 'store.sock'}"
            yield started


def tokens(fleet: Fleet) -> dict[str, Any]:
    """The join tokens by identity."""
    listed = json.loads(fleet.cli("token", "list", "-o", "json").stdout)["join_tokens"]
    return {token["identity"]: token for token in listed}


def test_a_token_is_created_listed_and_deleted(fleet: Fleet) -> None:
    ticket = read_ticket(fleet.cli("token", "create", "--worker", "gpu-*", "--uses", "3").stdout.strip())
    host, _, port = ticket.address.rpartition(":")
    assert (host, ticket.identity, len(ticket.secret)) == ("localhost", "worker/gpu-*", 32)
    assert int(port)
    assert ticket.ca_certificates
    token = tokens(fleet)["worker/gpu-*"]
    assert (token["uses_left"], token["creator"][:6]) == (3, "local/")
    assert ticket.secret.hex() not in str(token)
    fleet.cli("token", "delete", token["join_token_id"])
    assert "worker/gpu-*" not in tokens(fleet)
    fleet.refuse("token", "delete", token["join_token_id"], code=1, match="UNKNOWN_JOIN_TOKEN")


def test_a_token_for_nobody_or_for_a_unix_user_is_refused(fleet: Fleet) -> None:
    fleet.refuse("token", "create", code=2, match="name one identity")
    fleet.refuse("token", "create", "--user", "a", "--worker", "b", code=2, match="name one identity")
    fleet.refuse("token", "create", "--user", "a/b", code=1, match="is no name of an identity")


def test_on_loopback_nobody_joins(tmp_path: Path) -> None:
    with make_fleet(tmp_path) as loopback:
        match = "has no listener for enrolment"
        loopback.refuse("token", "create", "--worker", "a", code=1, match=match)


def join(fleet: Fleet, name: str, *options: str) -> str:
    """Starts a worker that joins by a new token on standard input, and waits until it is connected.

    Returns:
        The token.
    """
    token = fleet.cli("token", "create", "--worker", name, *options).stdout
    fleet.join_worker(name, token)
    fleet.wait(lambda: fleet.worker_state(name) == "WORKER_STATE_CONNECTED")
    return token


def test_a_worker_joins_and_needs_the_token_once(fleet: Fleet) -> None:
    join(fleet, "gpu-01")
    (worker,) = [one for one in fleet.client.workers() if one.name == "gpu-01"]
    credential = fleet.folder / "gpu-01" / "enrolment.json"
    assert credential.stat().st_mode & 0o777 == 0o600
    fleet.end_worker("gpu-01")
    fleet.join_worker("gpu-01")
    fleet.wait(lambda: fleet.worker_state("gpu-01") == "WORKER_STATE_CONNECTED")
    assert [one.worker_id for one in fleet.client.workers() if one.name == "gpu-01"] == [worker.worker_id]


def credential(fleet: Fleet, name: str) -> dict[str, Any]:
    """What a worker keeps in its state directory."""
    return json.loads((fleet.folder / name / "enrolment.json").read_text())  # type: ignore[no-any-return]


def refusal(fleet: Fleet, name: str, hello: Hello) -> str:
    """How the coordinator refuses a hello with the certificate of a worker."""
    kept = credential(fleet, name)
    keys = (kept[part].encode() for part in ("authorities", "key", "certificate"))
    channel = grpc.secure_channel(kept["coordinator"], grpc.ssl_channel_credentials(*keys))
    worker = ScriptedWorker(channel, ConnectRequest(hello=hello))
    try:
        error = worker.wait(lambda frame: frame.HasField("goodbye")).goodbye.error
        return ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
    finally:
        worker.close()


def test_a_certificate_gives_nothing_of_another_worker(fleet: Fleet) -> None:
    for name in ("gpu-02", "gpu-03"):
        join(fleet, name)
    workers = {worker.name: worker for worker in fleet.client.workers()}
    own, other = workers["gpu-02"].worker_id, workers["gpu-03"].worker_id
    (foreign,) = (gpu.gpu for gpu in fleet.client.gpus() if gpu.worker_name == "gpu-03")
    fleet.end_worker("gpu-02", signal.SIGTERM)
    assert refusal(fleet, "gpu-02", make_hello("gpu-03", 0, worker_id=other)) == "IDENTITY_MISMATCH"
    assert refusal(fleet, "gpu-02", make_hello("gpu-02", 0, worker_id=other)) == "IDENTITY_MISMATCH"
    stolen = make_hello("gpu-02", 0, worker_id=own, gpus=[foreign])
    assert refusal(fleet, "gpu-02", stolen) == "DUPLICATE_WORKER_GPU"
    forged = make_hello("gpu-02", 0, worker_id=own, last_epoch=2**62 - 2)
    assert refusal(fleet, "gpu-02", forged) == "PROTOCOL_VIOLATION"
    events = fleet.cli("get", "events").stdout
    assert f"GPU {foreign.uuid} belongs to worker/gpu-03" in events
