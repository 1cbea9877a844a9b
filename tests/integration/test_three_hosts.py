"""Three hosts in network namespaces, enrolled by tokens over mutual TLS."""

import json
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.enrolment_service_pb2 import JoinRequest
from leasehold.v1.enrolment_service_pb2_grpc import JoinServiceStub
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.worker.v1.session_pb2 import ConnectRequest, Hello
from leasehold_coordinator.access.roles import Role

from tests.chaos.namespaces import PORT
from tests.coordinator.api.test_authentication import ending
from tests.coordinator.api.test_roles import check_rows
from tests.coordinator.commands.test_enrolment import read_ticket, signing_request
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.integration.three_hosts import ADDRESS, UNIX_USERS, WORKERS, ThreeHosts, three_hosts, why_not

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[ThreeHosts]:
    """The hosts, and the users alice and bob."""
    with three_hosts(
        tmp_path, "caller_requests_per_s = 10_000\n"
    ) as started:  # one caller tries every method
        for user in UNIX_USERS:
            started.login(user, "user")
        yield started


def test_users_of_three_hosts(hosts: ThreeHosts) -> None:
    work(hosts)
    refuse_the_workload_of_another(hosts)
    refuse_a_stolen_token(hosts)
    refuse_a_replayed_request(hosts)
    refuse_the_name_of_another(hosts)
    refuse_by_role(hosts)
    revoke(hosts)


def work(hosts: ThreeHosts) -> None:
    """Each user has a workload on each host, which runs as the user's Unix user, is suspended and moves."""
    assert "user/alice: user" in hosts.verb("alice", "whoami")
    for worker in WORKERS:
        hosts.run_counter("alice", f"alice-{worker}", worker)
        assert hosts.unix_user(f"alice-{worker}") == UNIX_USERS["alice"]
    hosts.run_counter("bob", "bob-alpha", "alpha")
    assert hosts.unix_user("bob-alpha") == UNIX_USERS["bob"]
    hosts.verb("bob", "suspend", "bob-alpha")
    hosts.verb("alice", "remap", "alice-alpha", "--to", "alpha/1")
    hosts.verb("bob", "restore", "bob-alpha")
    for name in ("alice-alpha", "bob-alpha"):
        hosts.wait_counting(name)
    assert {worker.session_encrypted for worker in hosts.client.workers()} == {True}


def refuse_the_workload_of_another(hosts: ThreeHosts) -> None:
    said = hosts.verb("bob", "suspend", "alice-beta", code=1)
    assert "NOT_PERMITTED" in said
    hosts.wait_audited("user/bob", "SuspendWorkload", "NOT_PERMITTED")
    hosts.wait_counting("alice-beta")


def refuse_a_stolen_token(hosts: ThreeHosts) -> None:
    """Whoever finds the token of a worker that has joined gets nothing."""
    token = (hosts.folder / "alpha" / "join").read_text()
    hosts.join_worker("alpha", token, host="gamma")
    assert hosts.processes["alphagamma"].wait(60) == 2
    assert "worker/alpha can't join: the join token is unknown, expired or used up" in hosts.log("alphagamma")
    hosts.wait_audited("Join", "JOIN_REFUSED")
    assert hosts.is_connected("alpha")


def refuse_a_replayed_request(hosts: ThreeHosts) -> None:
    """A request that somebody recorded gets nothing. The key's owner signs a new one after a lost answer."""
    ticket = read_ticket(hosts.token("user", "carol"))
    roots = b"".join(
        x509.load_der_x509_certificate(one).public_bytes(Encoding.PEM) for one in ticket.ca_certificates
    )
    key = ec.generate_private_key(ec.SECP256R1())
    with grpc.secure_channel(ticket.address, grpc.ssl_channel_credentials(roots)) as channel:
        join = JoinServiceStub(channel).Join
        request = JoinRequest(secret=ticket.secret, identity="user/carol", csr=signing_request(key))
        first = join(request, timeout=30).certificate.certificate
        again = JoinRequest(secret=ticket.secret, identity="user/carol", csr=signing_request(key))
        assert join(again, timeout=30).certificate.certificate == first, "a lost answer is repeated"
        for other, reason in (
            (request, "JOIN_REFUSED"),
            (again, "JOIN_REFUSED"),
            (JoinRequest(secret=ticket.secret, identity="user/carol", csr=signing_request()), "JOIN_REFUSED"),
            (JoinRequest(secret=b"x" * 32, identity="user/carol", csr=request.csr), "JOIN_REFUSED"),
            (
                JoinRequest(secret=ticket.secret, identity="user/alice", csr=request.csr),
                "IDENTITY_MISMATCH",
            ),
        ):
            assert ending(lambda other=other: join(other, timeout=30))[1] == reason  # type: ignore[misc]
    hosts.wait_audited("user/carol", "JOIN_REFUSED")


def refuse_the_name_of_another(hosts: ThreeHosts) -> None:
    """The certificate of beta is worth nothing under the name of alpha."""
    kept = json.loads((hosts.folder / "beta" / "state" / "enrolment.json").read_text())
    keys = (kept[part].encode() for part in ("authorities", "key", "certificate"))
    credentials = grpc.ssl_channel_credentials(*keys)
    (alpha,) = (worker for worker in hosts.client.workers() if worker.name == "alpha")

    def refusal(hello: Hello) -> str:
        worker = ScriptedWorker(
            grpc.secure_channel(kept["coordinator"], credentials), ConnectRequest(hello=hello)
        )
        try:
            error = worker.wait(lambda frame: frame.HasField("goodbye")).goodbye.error
            return ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
        finally:
            worker.close()

    assert refusal(make_hello("alpha", 0, worker_id=alpha.worker_id)) == "IDENTITY_MISMATCH"
    hosts.wait_audited("worker/beta", "IDENTITY_MISMATCH")
    assert hosts.is_connected("alpha")
    assert hosts.is_connected("beta")


def revoke(hosts: ThreeHosts) -> None:
    """A revoked worker loses its session, and a revoked user its watches and calls, within 10 s."""
    command, variables = hosts.user_command("bob", "get", "workers", "--watch")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        hosts.admin("ca", "revoke", "user/bob")
        with ends_in_time("the watch of user/bob"):
            _, said = watch.communicate(timeout=60)
    assert watch.returncode == 1
    assert "user/bob is blocked" in said
    hosts.admin("ca", "revoke", "worker/gamma")
    with ends_in_time("the session of worker/gamma"):
        hosts.wait(lambda: not hosts.is_connected("gamma"))
    hosts.wait(lambda: "worker/gamma is blocked" in hosts.log("gamma"))
    assert "user/bob is blocked" in hosts.verb("bob", "get", "workers", code=1)
    hosts.wait_audited("BlockIdentity", "worker/gamma")
    assert "user/alice: user" in hosts.verb("alice", "whoami")


def refuse_by_role(hosts: ThreeHosts) -> None:
    """The holder of a certificate calls every method with each role."""
    ticket, key = read_ticket(hosts.token("user", "dora")), ec.generate_private_key(ec.SECP256R1())
    roots = b"".join(
        x509.load_der_x509_certificate(one).public_bytes(Encoding.PEM) for one in ticket.ca_certificates
    )
    with grpc.secure_channel(ticket.address, grpc.ssl_channel_credentials(roots)) as channel:
        request = JoinRequest(secret=ticket.secret, identity="user/dora", csr=signing_request(key))
        joined = JoinServiceStub(channel).Join(request, timeout=30)
    certificate = x509.load_der_x509_certificate(joined.certificate.certificate).public_bytes(Encoding.PEM)
    own = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    credentials = grpc.ssl_channel_credentials(roots, own, certificate)
    with grpc.secure_channel(f"{ADDRESS}:{PORT}", credentials) as channel:
        for role in Role:
            if role:
                hosts.admin("access", "grant", role.name.lower(), "user/dora")
            check_rows(channel, role, "user/dora")
    hosts.wait_audited("user/dora", "DeleteWorker", "NOT_PERMITTED")


REVOCATION_S = 10.0
"""Time in which a revocation ends calls and sessions (docs/security.md)."""

TURN_S = 0.05


@contextmanager
def ends_in_time(what: str) -> Iterator[None]:
    """Fails if something takes longer than a revocation may, without the time in which this machine stalled.

    A thread that sleeps again and again measures the stalls. The coordinator has the same processors.
    """
    stalled_s, is_over = 0.0, threading.Event()

    def measure() -> None:
        nonlocal stalled_s
        turned = time.monotonic()
        while not is_over.wait(TURN_S):
            stalled_s += max(0.0, time.monotonic() - turned - 2 * TURN_S)
            turned = time.monotonic()

    thread = threading.Thread(target=measure)
    thread.start()
    began = time.monotonic()
    try:
        yield
    finally:
        took_s = time.monotonic() - began
        is_over.set()
        thread.join()
    print(f"{what} ended {took_s:.1f} s after the revocation, of which the machine stalled {stalled_s:.1f} s")
    assert took_s - stalled_s <= REVOCATION_S, what


SHORT_LIVES = "client_certificate_days = 0.0015\nserver_certificate_days = 0.0015\n"
"""Certificates of about two minutes, which are renewed after half of that."""

COMMANDS = 100
ROTATION_TIMEOUT_S = 400.0


@pytest.mark.minutes
def test_certificates_and_the_authority_are_replaced_while_commands_run(tmp_path: Path) -> None:
    with three_hosts(tmp_path, SHORT_LIVES) as hosts:
        hosts.login("alice", "user")
        for worker in WORKERS:
            hosts.run_counter("alice", f"on-{worker}", worker)
        first, server, (old,) = serials(hosts), server_certificate(), authorities(hosts)
        epochs = {worker.name: worker.epoch for worker in hosts.client.workers()}
        is_over, done = threading.Event(), Counter[str]()

        def suspend_and_restore(worker: str) -> None:
            while not is_over.is_set() or done.total() < COMMANDS:
                for verb in ("suspend", "restore"):
                    hosts.verb("alice", verb, f"on-{worker}")
                    done[worker] += 1

        with ThreadPoolExecutor(len(WORKERS)) as threads:
            asking = [threads.submit(suspend_and_restore, worker) for worker in WORKERS]
            try:
                hosts.admin("ca", "rotate")
                hosts.wait(lambda: is_retired(hosts, old, asking), ROTATION_TIMEOUT_S)
            finally:
                is_over.set()
            for ended in asking:
                ended.result()
        for worker in WORKERS:
            hosts.wait_counting(f"on-{worker}")
        states = [CommandState.Name(command.state) for command in hosts.client.commands(10_000)]
        assert set(states) == {"COMMAND_STATE_SUCCEEDED"}
        assert len(states) == done.total() + len(WORKERS) >= COMMANDS
        now = serials(hosts)
        assert all(now[name].isdisjoint(first[name]) for name in first)
        assert server_certificate() != server
        assert old not in authorities(hosts)
        assert epochs == {worker.name: worker.epoch for worker in hosts.client.workers()}, "one session each"


def is_retired(hosts: ThreeHosts, authority: str, asking: list[Future[None]]) -> bool:
    """Retires an authority, unless a valid certificate of it is left."""
    for ended in asking:
        if ended.done():
            ended.result()  # a command failed
    listed = json.loads(hosts.admin("ca", "list", "-o", "json"))["authorities"]
    (found,) = (one for one in listed if one["serial"] == authority)
    if found.get("valid_certificate_count") or found.get("signs_server"):
        return False
    hosts.admin("ca", "retire", authority)
    return True


def authorities(hosts: ThreeHosts) -> list[str]:
    """The serial numbers of the authorities."""
    return [one["serial"] for one in json.loads(hosts.admin("ca", "list", "-o", "json"))["authorities"]]


def serials(hosts: ThreeHosts) -> dict[str, set[str]]:
    """The serial numbers of the valid certificates of each identity."""
    found: dict[str, set[str]] = {}
    for certificate in json.loads(hosts.admin("ca", "list", "-o", "json"))["certificates"]:
        if certificate["state"] != "CERTIFICATE_STATE_VALID":
            continue  # the session of a worker goes on
        found.setdefault(certificate["identity"], set()).add(certificate["serial"])
    return found


def server_certificate() -> str:
    """The certificate of the listener for enrolment, to which anybody may connect."""
    return ssl.get_server_certificate((ADDRESS, 7402), timeout=30)
