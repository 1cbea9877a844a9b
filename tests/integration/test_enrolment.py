"""A coordinator off loopback: who gets a join token, and what it is worth."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from leasehold.v1.enrolment_service_pb2 import JoinRequest
from leasehold.v1.enrolment_service_pb2_grpc import JoinServiceStub
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.worker.v1.session_pb2 import ConnectRequest, Hello
from leasehold_client.coordinator import login as client_login
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, UsageError
from leasehold_coordinator.access.authority import open_authority
from leasehold_coordinator.access.join_tokens import ticket_text
from leasehold_worker.files.enrolment_file import Enrolment
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.session import client_keys, enrolment

from tests.coordinator.commands.test_enrolment import read_ticket
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.integration.fleets import TIMEOUT_S, Fleet, make_fleet

SETTINGS = 'server_names = ["localhost"]\n'


def set_directories(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Gives daemons and verbs directories of their own."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME"):
        (folder / name).mkdir(mode=0o700)
        patch.setenv(name, str(folder / name))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator that other hosts reach, with directories of its own. Verbs use its socket."""
    folder = tmp_path_factory.mktemp("enrolment")
    with pytest.MonkeyPatch.context() as patch:
        set_directories(folder, patch)
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


@pytest.mark.long
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
    fleet.refuse("token", "create", "--user", "a/b", code=2, match="is no name of an identity")


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
    fleet.end("gpu-01")
    fleet.join_worker("gpu-01")
    fleet.wait(lambda: fleet.worker_state("gpu-01") == "WORKER_STATE_CONNECTED")
    assert [one.worker_id for one in fleet.client.workers() if one.name == "gpu-01"] == [worker.worker_id]


def connected(fleet: Fleet, name: str) -> bool:
    return fleet.worker_state(name) == "WORKER_STATE_CONNECTED"


@pytest.mark.long
def test_hosts_share_the_file_of_a_token_with_a_pattern(fleet: Fleet) -> None:
    options = ("--worker", "node-*", "--uses", "2")
    first = fleet.cli("token", "create", *options).stdout
    fleet.join_worker("node-01", first, "--name", "node-01")
    fleet.wait(partial(connected, fleet, "node-01"))
    before = credential(fleet, "node-01")["certificate"]
    fleet.end("node-01", signal.SIGTERM)
    later = fleet.cli("token", "create", *options).stdout
    for name in ("node-01", "node-02"):  # the file has the token for new hosts meanwhile
        fleet.join_worker(name, later, "--name", name)
        fleet.wait(partial(connected, fleet, name))
    assert credential(fleet, "node-01")["certificate"] == before
    fleet.end("node-01", signal.SIGTERM)
    exact = fleet.cli("token", "create", "--worker", "node-01", "--replace").stdout
    fleet.join_worker("node-01", exact)
    fleet.wait(lambda: credential(fleet, "node-01")["certificate"] != before)


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
    fleet.end("gpu-02", signal.SIGTERM)
    assert refusal(fleet, "gpu-02", make_hello("gpu-03", 0, worker_id=other)) == "IDENTITY_MISMATCH"
    assert refusal(fleet, "gpu-02", make_hello("gpu-02", 0, worker_id=other)) == "IDENTITY_MISMATCH"
    stolen = make_hello("gpu-02", 0, worker_id=own, gpus=[foreign])
    assert refusal(fleet, "gpu-02", stolen) == "DUPLICATE_WORKER_GPU"
    forged = make_hello("gpu-02", 0, worker_id=own, last_epoch=2**62 - 2)
    assert refusal(fleet, "gpu-02", forged) == "PROTOCOL_VIOLATION"
    events = fleet.cli("get", "events").stdout
    assert "GPU gpu-03/0 belongs to worker/gpu-03" in events


def login(fleet: Fleet, identity: str, *options: str, code: int = 0) -> str:
    """Logs a user in by a new token, and returns what the verb says."""
    kind, _, name = identity.partition("/")
    file = fleet.folder / f"{name}.token"
    file.write_text(fleet.cli("token", "create", f"--{kind}", name).stdout)
    done = fleet.cli("login", "--token", str(file), *options, code=code)
    return done.stdout + done.stderr


def by_context(fleet: Fleet, *arguments: str, code: int = 0, **environment: str) -> str:
    """What a verb says that gets its coordinator from a context."""
    done = fleet.cli(*arguments, code=code, LEASEHOLD_COORDINATOR="", **environment)
    return done.stdout + done.stderr


def test_a_user_logs_in_and_later_verbs_need_no_option(fleet: Fleet) -> None:
    assert "user/alice: logged in to localhost:" in login(fleet, "user/alice")
    contexts = fleet.folder / "XDG_CONFIG_HOME/leasehold/contexts.json"
    assert contexts.stat().st_mode & 0o777 == 0o600
    again = ("login", "--token", str(fleet.folder / "alice.token"))
    assert "the token was used before, and its certificate is valid" in fleet.cli(*again).stdout
    assert by_context(fleet, "whoami").startswith("user/alice: no role")
    assert "service/slurm: logged in" in login(fleet, "service/slurm", "--context", "batch")
    assert by_context(fleet, "whoami").startswith("service/slurm:")
    assert by_context(fleet, "whoami", "--context", "alice").startswith("user/alice:")
    assert by_context(fleet, "whoami", LEASEHOLD_CONTEXT="alice").startswith("user/alice:")
    assert fleet.cli("whoami").stdout.startswith("local/"), "--coordinator leaves out the current context"
    by_context(fleet, "context", "use", "alice")
    assert re.search(r"^\* +alice +user/alice", by_context(fleet, "context", "list"), re.MULTILINE)
    by_context(fleet, "context", "use", "-")
    assert re.search(r"^ +alice +user/alice", by_context(fleet, "context", "list"), re.MULTILINE)
    fleet.cli("ca", "revoke", "user/alice")
    refused = fleet.cli(*again, code=1)
    assert "user/alice is blocked" in refused.stderr
    assert not refused.stdout
    assert "*" not in by_context(fleet, "context", "list"), "a refused login makes no context the current one"
    by_context(fleet, "context", "delete", "alice")
    assert "alice" not in by_context(fleet, "context", "list")
    assert "no context is named 'alice'" in by_context(fleet, "whoami", "--context", "alice", code=2)


@pytest.mark.long
def test_a_service_acts_for_a_user_by_its_context(fleet: Fleet) -> None:
    login(fleet, "service/gateway")
    for identity in ("service/gateway", "user/ann"):
        fleet.cli("access", "grant", "user", identity)
    fleet.cli("access", "grant", "on_behalf_of", "service/gateway", "--users", "user/a*")
    said = by_context(fleet, "whoami", "--as", "user/ann")
    assert said == "service/gateway on behalf of user/ann: user\n"
    assert by_context(fleet, "get", "workloads", "--as", "user/ann").startswith("NAME")
    assert "(NOT_PERMITTED)" in by_context(fleet, "whoami", "--as", "user/ben", code=1)
    assert by_context(fleet, "context", "use", "-") == "no context is current\n"


def test_a_certificate_is_exported_for_other_programs(fleet: Fleet, tmp_path: Path) -> None:
    login(fleet, "service/prometheus")
    folder = tmp_path / "pem"
    for _ in range(2):  # the second time replaces the files
        said = fleet.cli("context", "export", "prometheus", str(folder)).stdout
    assert said == (
        f"prometheus: wrote ca.pem, client.key, client.pem to {folder}; the certificate expires in 29 days\n"
    )
    assert sorted((path.name, path.stat().st_mode & 0o777) for path in folder.iterdir()) == [
        ("ca.pem", 0o600),
        ("client.key", 0o600),
        ("client.pem", 0o600),
    ]
    contexts = json.loads(fleet.cli("context", "list", "-o", "json").stdout)["contexts"]
    [address] = [one["coordinator"] for one in contexts if one["name"] == "prometheus"]
    asked = {"LEASEHOLD_COORDINATOR": address, "LEASEHOLD_CREDENTIALS": str(folder)}
    assert fleet.cli("whoami", **asked).stdout.startswith("service/prometheus: no role")
    file = tmp_path / "file"
    file.touch()
    fleet.refuse("context", "export", "prometheus", str(file), code=2, match="is a file")
    fleet.refuse(
        "context", "export", "prometheus", "/proc/pem", code=2, match="can't be written to /proc/pem: .*yours"
    )


def end(fleet: Fleet, name: str) -> None:
    """Waits until a worker has ended by itself, because it can't start."""
    process = fleet.processes.pop(name)
    assert process.wait(TIMEOUT_S) == 2
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.long
def test_a_stolen_token_and_one_for_others_get_no_certificate(fleet: Fleet) -> None:
    login(fleet, "user/bob")
    assert "(JOIN_REFUSED)" in by_context(
        fleet, "login", "--token", str(fleet.folder / "bob.token"), XDG_CONFIG_HOME=str(fleet.folder), code=1
    )
    token = join(fleet, "gpu-04")
    fleet.join_worker("gpu-05", token, "--name", "gpu-04")
    end(fleet, "gpu-05")
    assert "worker/gpu-04 can't join: the join token is unknown, expired or used up" in fleet.log("gpu-05")
    file = fleet.folder / "gpu.token"
    file.write_text(token)
    said = by_context(fleet, "login", "--token", token.strip(), code=2)
    assert "it is the token itself" in said
    assert token.strip() not in said
    assert "the join token is for worker/gpu-04" in by_context(fleet, "login", "--token", str(file), code=2)


def test_the_server_is_verified_before_it_gets_the_secret(fleet: Fleet, tmp_path: Path) -> None:
    real = read_ticket(fleet.cli("token", "create", "--user", "carol").stdout.strip())
    other = open_authority(tmp_path).certificate.public_bytes(Encoding.DER)
    real.ca_certificates[:] = [other]
    file = fleet.folder / "carol.token"
    file.write_text(ticket_text(real))
    said = by_context(fleet, "login", "--token", str(file), code=1)
    assert "is not from the authority" in said
    assert tokens(fleet)["user/carol"]["uses_left"] == 1


@pytest.mark.long
def test_a_deleted_worker_is_out_and_its_name_is_free(fleet: Fleet) -> None:
    join(fleet, "gpu-06")
    fleet.end("gpu-06", signal.SIGTERM)
    fleet.cli("rm", "worker", "gpu-06")
    fleet.join_worker("gpu-06")
    fleet.wait(lambda: "is revoked" in fleet.log("gpu-06"))
    fleet.end("gpu-06", signal.SIGTERM)
    (fleet.folder / "gpu-06" / "worker_id").write_text("worker-reinstalled\n")
    join(fleet, "gpu-06")


def test_a_worker_whose_answer_was_lost_joins_by_the_same_token(fleet: Fleet, tmp_path: Path) -> None:
    ticket = read_ticket(fleet.cli("token", "create", "--worker", "gpu-07").stdout.strip())
    kept: list[Enrolment] = []

    class Forgetful(StateDirectory):  # type: ignore[misc]  # final for us, and open for this test
        """Keeps what it should write."""

        def save_enrolment(self, enrolment: Enrolment) -> None:
            kept.append(enrolment)
            super().save_enrolment(enrolment)

    state = Forgetful(tmp_path)
    enrolment.join(ticket, state, "gpu-07", ["GPU-7"])
    pending, first = kept
    state.save_enrolment(pending)  # as if the worker had been killed before the answer
    enrolment.join(ticket, state, "gpu-07", ["GPU-7"])
    again = state.enrolment()
    assert again is not None
    assert (again.key, again.certificate) == (first.key, first.certificate)
    before = len(kept)
    enrolment.join(ticket, state, "gpu-07", ["GPU-7"])
    assert len(kept) == before, "a token that was used is not sent again"


def test_a_login_whose_answer_was_lost_uses_the_same_token(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ticket = client_login.read_ticket(fleet.cli("token", "create", "--user", "dora").stdout)
    with monkeypatch.context() as patch:

        def lose(*_: object) -> None:
            raise LeaseholdError("the connection broke")

        patch.setattr(client_login, "_with_certificate", lose)
        with pytest.raises(LeaseholdError, match="the connection broke"):
            client_login.login(ticket, "", "")
    with pytest.raises(UsageError, match="repeat `leasehold login`"):
        Client(context="dora")
    made = client_login.login(ticket, "", "")
    assert client_login.login(ticket, "", "") == made
    with Client() as client:
        assert client.who_am_i().identity == "user/dora"


@pytest.mark.parametrize(
    ("name", "new_key", "sign"),
    [
        ("eve", client_login.new_key, client_login.signing_request),
        ("eva", client_keys.new_key, client_keys.signing_request),
    ],
)
def test_a_recorded_join_is_refused(
    fleet: Fleet, name: str, new_key: Callable[[], str], sign: Callable[[str], bytes]
) -> None:
    """By the keys and requests of the client, and by those of the worker."""
    ticket = client_login.read_ticket(fleet.cli("token", "create", "--user", name).stdout)
    key, identity = new_key(), f"user/{name}"
    first, again = (JoinRequest(secret=ticket.secret, identity=identity, csr=sign(key)) for _ in range(2))
    roots = client_login.as_pem(ticket.ca_certificates).encode()
    with grpc.secure_channel(ticket.address, grpc.ssl_channel_credentials(roots)) as channel:
        join = JoinServiceStub(channel).Join
        issued = [join(one, timeout=TIMEOUT_S).certificate.certificate for one in (first, again)]
        assert issued[0] == issued[1]
        for recorded in (first, again):
            with pytest.raises(grpc.RpcError, match="was sent before, and each one is") as error:
                join(recorded, timeout=TIMEOUT_S)
            assert cast("grpc.Call", error.value).code() is grpc.StatusCode.PERMISSION_DENIED
    wanted = f'method:Join AND resource = "{identity}" AND outcome = ALLOWED'
    assert fleet.cli("get", "audit", "--filter", wanted).stdout.count(identity) >= 2


@pytest.mark.long
def test_a_copy_of_a_state_directory_is_no_second_worker(fleet: Fleet) -> None:
    join(fleet, "gpu-08")
    shutil.copytree(fleet.folder / "gpu-08", fleet.folder / "gpu-09", ignore=shutil.ignore_patterns("*.sock"))
    fleet.join_worker("gpu-09")
    fleet.wait(lambda: "another instance of worker" in fleet.log("gpu-09"))
    assert fleet.worker_state("gpu-08") == "WORKER_STATE_CONNECTED"
    fleet.end("gpu-09")
