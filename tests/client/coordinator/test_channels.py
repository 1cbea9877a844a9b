"""Where a client finds its coordinator, and the credentials for it."""

import asyncio
import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from leasehold_client import config
from leasehold_client.aio.client import AsyncClient
from leasehold_client.config import DEFAULT_COORDINATOR, default_coordinator
from leasehold_client.contexts import Context, Contexts, locked_contexts
from leasehold_client.coordinator import retry
from leasehold_client.coordinator.channels import certificate_file, find_credentials
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError
from leasehold_coordinator.server.transport import open_state

ADDRESS = "127.0.0.1:1"


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for credentials."""
    monkeypatch.setenv("LEASEHOLD_CREDENTIALS", str(tmp_path))
    return tmp_path


def test_the_socket_comes_first_if_a_coordinator_answers_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "leasehold/coordinator.sock"
    path.parent.mkdir()
    assert default_coordinator() == DEFAULT_COORDINATOR
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert default_coordinator() == DEFAULT_COORDINATOR, "nobody listens yet"
        listener.listen()
        assert default_coordinator() == f"unix:{path}"
    assert default_coordinator() == DEFAULT_COORDINATOR, "the coordinator was killed"


def test_the_hosts_socket_is_meant_while_its_coordinator_restarts(
    credentials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "run" / "coordinator.sock"
    monkeypatch.setattr(config, "SYSTEM_SOCKET", path)
    assert default_coordinator() == DEFAULT_COORDINATOR
    path.parent.mkdir()
    assert default_coordinator() == f"unix:{path}"
    (credentials / "ca.pem").touch()
    assert default_coordinator() == DEFAULT_COORDINATOR


def test_missing_credentials_are_waited_for_and_named(
    credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "REPEAT_LIMIT_S", 0.5)
    waits: list[LeaseholdError] = []
    with pytest.raises(NoCoordinatorError, match=r"ca\.pem is missing: start a coordinator as this user"):
        Client(ADDRESS, waits.append)
    assert waits


def test_a_certificate_of_a_context_is_named_where_it_would_do(
    credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(credentials))
    with locked_contexts() as write:
        write(Contexts("", {"ann": Context("ann", "user/ann", coordinator=ADDRESS)}))
    by_context = "use the certificate of a context by --context ann, or for all calls"
    with pytest.raises(UsageError, match=f"{by_context} by `leasehold context use ann`"):
        Client(ADDRESS)
    monkeypatch.setenv("LEASEHOLD_COORDINATOR", ADDRESS)
    with pytest.raises(UsageError, match="`unset LEASEHOLD_COORDINATOR; leasehold context use ann`"):
        Client()
    with pytest.raises(NoCoordinatorError, match=r"login --token -`$"):
        find_credentials("elsewhere:7400")
    with locked_contexts() as write:
        known = {name: Context(name, f"user/{name}", coordinator=ADDRESS) for name in ("bob", "ann")}
        write(Contexts("ann", known))
    with pytest.raises(UsageError, match=f"{by_context} by `unset LEASEHOLD_COORDINATOR`"):
        Client()
    monkeypatch.delenv("LEASEHOLD_COORDINATOR")
    with pytest.raises(UsageError, match=f"{by_context} without the address"):
        Client(ADDRESS)
    with pytest.raises(NoCoordinatorError, match="without the address, the context ann is in use"):
        find_credentials("elsewhere:7400")
    with pytest.raises(NoCoordinatorError, match="start a coordinator as this user"):
        find_credentials(f"insecure:{ADDRESS}")


def test_credentials_that_come_late_are_found(credentials: Path) -> None:
    def start(_: LeaseholdError) -> None:
        open_state(credentials)

    with Client(ADDRESS, start):
        pass


@pytest.mark.parametrize(("name", "content"), [("ca.pem", ""), ("ca.pem", "x"), ("client.token", "ü" * 40)])
def test_credentials_that_hold_nothing_are_refused(credentials: Path, name: str, content: str) -> None:
    open_state(credentials)
    (credentials / name).write_text(content)
    with pytest.raises(UsageError, match=rf"{name} holds no "):
        Client(ADDRESS)


def test_a_socket_needs_no_file_of_credentials(credentials: Path) -> None:
    (credentials / "client.pem").touch()
    assert certificate_file(ADDRESS) == credentials / "client.pem"
    assert certificate_file("unix:/run/coordinator.sock") is None


CUT = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.fixture
def pair(credentials: Path) -> tuple[str, str]:
    """A directory with an own certificate and its key, and another key."""
    open_state(credentials)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "alice")])
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(name, name, keys[0].public_key(), 1, begin, begin.replace(year=2046))
    certificate = builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (credentials / "client.pem").write_bytes(certificate)
    own, other = (_pem(key, serialization.NoEncryption()) for key in keys)
    (credentials / "client.key").write_text(own)
    return own, other


def _pem(key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption) -> str:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, encryption).decode()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("ca.pem", CUT, r"ca\.pem holds no certificate: copy it from the coordinator's host again"),
        ("client.pem", "x", r"client\.pem holds no certificate: copy it from its issuer again"),
        ("client.pem", CUT, r"client\.pem holds no certificate"),
        ("client.key", "x", r"client\.key holds no private key: copy the file again"),
        (
            "client.key",
            "OTHER",
            r"client\.key does not belong to the certificate: copy both files from one issue",
        ),
        ("client.key", "ENCRYPTED", r"client\.key is encrypted, and nobody is asked for a passphrase"),
    ],
)
def test_malformed_certificates_and_keys_are_refused_before_grpc_logs_them(
    credentials: Path,
    pair: tuple[str, str],
    capfd: pytest.CaptureFixture[str],
    name: str,
    content: str,
    match: str,
) -> None:
    with Client(ADDRESS):
        pass
    if content == "OTHER":
        content = pair[1]
    elif content == "ENCRYPTED":
        content = _pem(
            ec.generate_private_key(ec.SECP256R1()), serialization.BestAvailableEncryption(b"word")
        )
    (credentials / name).write_text(content)
    with pytest.raises(UsageError, match=match):
        Client(ADDRESS)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "user", ["user/a\nb", "user/\x00", "user/ü", "alice", "service/batch", "user/" + "a" * 65]
)
def test_a_user_that_no_header_can_carry_is_refused(
    credentials: Path, capfd: pytest.CaptureFixture[str], user: str
) -> None:
    open_state(credentials)
    with pytest.raises(UsageError, match=r"a service acts for a user, and .* is none: write user/NAME"):
        Client(ADDRESS, on_behalf_of=user)

    async def call() -> None:
        async with AsyncClient(ADDRESS, on_behalf_of=user) as client:
            await client.who_am_i()

    with pytest.raises(UsageError, match="a service acts for a user"):
        asyncio.run(call())
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_socket_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sock"
    serve = (
        "import os, socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1])\n"
        "os.setuid(65534); listener.listen(); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", serve, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with pytest.raises(UsageError, match="served by the Unix user 65534"):
            Client(f"unix:{path}")


def test_a_path_of_a_socket_that_nobody_serves_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "REPEAT_LIMIT_S", 0.3)
    with pytest.raises(NoCoordinatorError, match="no coordinator answers at unix:"):
        Client(f"unix:{tmp_path}/none.sock")


def test_a_directory_of_credentials_that_can_not_be_looked_at_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LEASEHOLD_CREDENTIALS", "/" + "x" * 300)
    with pytest.raises(UsageError, match=r"client\.pem can't be read: File name too long; name a directory"):
        certificate_file(ADDRESS)


def test_credentials_that_are_no_files_are_refused(credentials: Path) -> None:
    (credentials / "ca.pem").mkdir()
    with pytest.raises(UsageError, match=r"ca\.pem"):
        Client(ADDRESS)
