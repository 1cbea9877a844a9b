"""Users with tokens of an OpenID Connect issuer, against a real coordinator and the command line."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_ALLOWED
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold_client.config import credentials_directory
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, UsageError
from leasehold_coordinator.access.methods import METHODS

from tests.coordinator.api.test_authentication import (
    CONNECT,
    OF_OTHER_LISTENERS,
    UNAUTHENTICATED,
    UNIMPLEMENTED,
    channel_with,
    ending,
)
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.issuer import (
    AUDIENCE,
    ISSUER,
    KeyServer,
    PrivateKey,
    by_hand,
    claims,
    key_set,
    new_keys,
    serving_keys,
    sign,
)
from tests.coordinator.stories.test_lifecycle import until
from tests.prefork import COMMAND_LINE, run

QUICK = """
from leasehold_coordinator.access import key_source as k
k.KeySource.__init__.__defaults__ = (0.5,)
"""
SETTINGS = """
oidc_listen = "127.0.0.1:0"
[oidc]
issuer = "{issuer}"
audience = "{audience}"
{keys}
name_claim = "email"
role_claim = "groups"
roles = {{ "gpu-users" = "user", "gpu-admins" = "admin" }}
"""


@dataclass
class Issuer:
    """The issuer of a test, and a coordinator that trusts it."""

    coordinator: CoordinatorProcess
    server: KeyServer
    keys: dict[str, tuple[str, PrivateKey]]
    address: str

    def token(self, key_id: str = "es", **changed: object) -> str:
        """A token of alice."""
        algorithm, key = self.keys[key_id]
        return sign(key, algorithm, key_id, **{"email": "alice@example.com", **changed})

    def list_workers(self, *headers: str) -> object:
        """A call with these credentials."""
        with channel_with(self.address, *headers) as channel:
            return FleetServiceStub(channel).ListWorkers(ListWorkersRequest(), timeout=20)


@contextmanager
def trusting(folder: Path, keys: str) -> Iterator[tuple[CoordinatorProcess, str]]:
    """A coordinator with a listener for OpenID Connect, and the listener's address."""
    path = folder / "coordinator.toml"
    path.write_text(SETTINGS.format(issuer=ISSUER, audience=AUDIENCE, keys=keys))
    coordinator = CoordinatorProcess(folder, prelude=QUICK, options=["--config", str(path)])
    coordinator.start()
    found = re.search(r"listening on (\S+) for OpenID Connect", coordinator.log())
    assert found
    yield coordinator, found[1]
    assert coordinator.end(signal.SIGTERM) == 0
    assert "Traceback" not in coordinator.log()


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Issuer]:
    """The issuer of the tests of this module."""
    keys = new_keys()
    folder = tmp_path_factory.mktemp("oidc")
    with (
        serving_keys(key_set(keys)) as server,
        trusting(folder, f'jwks_url = "{server.url}"') as (coordinator, address),
    ):
        until(lambda: "read 4 keys of the OpenID Connect issuer" in coordinator.log())
        yield Issuer(coordinator, server, keys, address)


@pytest.fixture
def cli(issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs verbs as a user whose token is in a file."""
    monkeypatch.setenv("LEASEHOLD_TOKEN_FILE", str(tmp_path / "token"))

    def call(*arguments: str, code: int = 0) -> str:
        done = run(
            COMMAND_LINE,
            arguments,
            timeout=30,
            env={**os.environ, "LEASEHOLD_COORDINATOR": issuer.address},
        )
        assert done.returncode == code, done
        return done.stderr if code else done.stdout

    return call


@pytest.mark.long
def test_verbs_of_a_user(issuer: Issuer, cli: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(issuer.token() + "\n")
    assert "user/oidc-alice@example.com" in cli("whoami")
    assert "has no role" in cli("get", "workers", code=1)
    path.write_text(issuer.token(groups=["gpu-users"]))
    cli("get", "workers")
    assert "needs the role admin" in cli("access", "list", code=1)
    path.write_text(issuer.token(groups="gpu-admins"))
    assert "admin" in cli("whoami")
    path.write_text(issuer.token(exp=int(time.time()) - 100))
    assert "the token is not valid (Signature has expired): get another one" in cli("whoami", code=1)


def test_a_binding_adds_to_the_claim(issuer: Issuer) -> None:
    bob = issuer.token(email="bob")
    with pytest.raises(grpc.RpcError, match="no role"):
        issuer.list_workers(f"Bearer {bob}")
    with Client(issuer.coordinator.address) as admin:
        admin.grant("viewer", "user/oidc-bob")
    issuer.list_workers(f"Bearer {bob}")


def test_each_new_token_is_a_login_in_the_audit(issuer: Issuer) -> None:
    token = issuer.token(email="newcomer", groups="gpu-users")
    for _ in range(2):
        issuer.list_workers(f"Bearer {token}")
    with Client(issuer.coordinator.address) as admin:
        (login,) = admin.audit_entries(filter="method = login AND identity:newcomer")
    assert (login.outcome, login.count) == (AUDIT_OUTCOME_ALLOWED, 1)


@pytest.mark.parametrize("key_id", ["rs", "ps", "es", "ed"])
def test_each_algorithm(issuer: Issuer, key_id: str) -> None:
    issuer.list_workers(f"Bearer {issuer.token(key_id, groups='gpu-users')}")


def test_the_scheme_of_the_token_is_of_any_case(issuer: Issuer) -> None:
    issuer.list_workers(f"bearer {issuer.token(groups='gpu-users')}")


def test_forged_tokens(issuer: Issuer) -> None:
    good = issuer.token(groups="gpu-admins")
    header, payload, signature = good.split(".")
    forged = [
        by_hand({"alg": "none", "kid": "es"}, claims(groups="gpu-admins")),
        issuer.token(iss="https://evil.example"),
        issuer.token(aud="another"),
        issuer.token(email="../root"),
        sign(issuer.keys["rs"][1], "RS256", "es", email="alice"),
        f"{header}.{payload}.",
        f"{header}.{payload}.{signature[:-6]}AAAAAA",
        "x",
        (credentials_directory() / "client.token").read_text().strip(),
    ]
    for one in forged:
        assert ending(lambda one=one: issuer.list_workers(f"Bearer {one}")) == UNAUTHENTICATED, one  # type: ignore[misc]
    for headers in ((), (good,), (f"Basic {good}",), (f"Bearer {good}", f"Bearer {good}")):
        assert ending(lambda headers=headers: issuer.list_workers(*headers)) == UNAUTHENTICATED  # type: ignore[misc]
    assert "Traceback" not in issuer.coordinator.log()


def test_a_huge_token_costs_its_caller_only(issuer: Issuer) -> None:
    with pytest.raises(grpc.RpcError):
        issuer.list_workers(f"Bearer {issuer.token(padding='x' * 60_000)}")
    assert ending(lambda: issuer.list_workers(f"Bearer {'x' * 7_000}")) == UNAUTHENTICATED
    issuer.list_workers(f"Bearer {issuer.token(groups='gpu-users')}")


def test_only_this_listener_takes_these_tokens(issuer: Issuer) -> None:
    good = f"Bearer {issuer.token(groups='gpu-admins')}"
    with channel_with(issuer.coordinator.address, good) as channel:
        stub = FleetServiceStub(channel)
        assert ending(lambda: stub.ListWorkers(ListWorkersRequest(), timeout=20)) == UNAUTHENTICATED
    with channel_with(issuer.address, good) as channel:
        connect: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONNECT)
        frame = ConnectRequest().SerializeToString()
        code, _ = ending(lambda: next(connect(iter([frame]), timeout=20)))
        assert code is grpc.StatusCode.UNIMPLEMENTED
    with channel_with(issuer.address) as channel:
        for method, needed in METHODS.items():
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            expected = UNIMPLEMENTED if needed in OF_OTHER_LISTENERS else UNAUTHENTICATED
            assert ending(lambda: next(call(b"", timeout=20))) == expected, method  # noqa: B023


def test_a_watch_ends_with_its_token(issuer: Issuer) -> None:
    """A token counts for a minute after its expiry, since clocks differ."""
    short = issuer.token(groups="gpu-users", exp=int(time.time()) - 58)
    with channel_with(issuer.address, f"Bearer {short}") as channel:
        watch = FleetServiceStub(channel).WatchFleet(WatchFleetRequest(), timeout=60)

        def read_to_the_end() -> None:
            for _ in watch:
                pass

        assert ending(read_to_the_end) == UNAUTHENTICATED


def test_a_new_key_is_fetched(issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats the call while the coordinator fetches the keys, and a removed key is of no use."""
    new, old = new_keys()["es"], issuer.token("rs", groups="gpu-users")
    issuer.list_workers(f"Bearer {old}")
    path = tmp_path / "token"
    path.write_text(sign(new[1], "ES256", "new", email="carol", groups="gpu-users"))
    monkeypatch.setenv("LEASEHOLD_TOKEN_FILE", str(path))
    before = issuer.server.document
    issuer.server.document = key_set({"new": new, "es": issuer.keys["es"]})

    def is_known() -> bool:
        """False: the coordinator fetched the keys just before."""
        with Client(issuer.address) as client:
            try:
                return client.workers() == []
            except LeaseholdError:
                return False

    until(is_known)
    assert ending(lambda: issuer.list_workers(f"Bearer {old}"))[0] in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAVAILABLE,
    )
    issuer.server.document = before


@pytest.mark.long
def test_a_block_overrides_the_claim(issuer: Issuer) -> None:
    mallory = f"Bearer {issuer.token(email='mallory', groups='gpu-admins')}"
    with channel_with(issuer.address, mallory) as channel:
        watch = FleetServiceStub(channel).WatchFleet(WatchFleetRequest(), timeout=60)
        next(watch)
        with Client(issuer.coordinator.address) as admin:
            admin.certificates.block("user/oidc-mallory")

        def read_to_the_end() -> None:
            for _ in watch:
                pass

        assert ending(read_to_the_end) == UNAUTHENTICATED
    assert ending(lambda: issuer.list_workers(mallory)) == UNAUTHENTICATED


@pytest.mark.parametrize(
    ("content", "match"),
    [
        *(
            (content, "holds no token: get one from the OpenID Connect issuer")
            for content in ("", "a b", "ü")
        ),
        ("{" * 8_193, "holds no token: get one"),
        ("x" * 8_193 + "\n", "has 8,193 bytes, and the limit is 8,192: get a token with fewer claims"),
        ("x" * 70_000, "has 65,536 bytes or more, and the limit is 8,192"),
    ],
    ids=["empty", "two", "not-ascii", "long-object", "long", "longer-than-is-read"],
)
def test_a_file_without_a_token(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, match: str
) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    monkeypatch.setenv("LEASEHOLD_TOKEN_FILE", str(path))
    with pytest.raises(UsageError, match=match):
        Client(issuer.address)
    path.unlink()
    with pytest.raises(UsageError, match="can't be read: No such file"):
        Client(issuer.address)
    with pytest.raises(UsageError, match="would travel to insecure:"):
        Client("insecure:127.0.0.1:1")
    with pytest.raises(UsageError, match="and LEASEHOLD_TOKEN_FILE names a token"):
        Client(f"unix:{issuer.coordinator.folder}/store.sock")


def test_keys_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = new_keys()
    path = tmp_path / "keys.json"
    path.write_bytes(key_set({"es": keys["es"]}))
    (tmp_path / "token").write_text(sign(keys["es"][1], "ES256", "es", email="alice", groups="gpu-users"))
    monkeypatch.setenv("LEASEHOLD_TOKEN_FILE", str(tmp_path / "token"))
    with trusting(tmp_path, f'jwks_file = "{path}"') as (_, address), Client(address) as client:
        assert client.workers() == []


@pytest.mark.long
def test_an_issuer_that_is_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(sign(new_keys()["es"][1], "ES256", "es"))
    monkeypatch.setenv("LEASEHOLD_TOKEN_FILE", str(tmp_path / "token"))
    with trusting(tmp_path, 'jwks_url = "http://127.0.0.1:1/"') as (coordinator, address):
        with (
            Client(address) as client,
            pytest.raises(LeaseholdError, match="see the coordinator's log") as error,
        ):
            client.workers()
        assert error.value.reason == "ISSUER_UNAVAILABLE"
        until(lambda: "the keys of the OpenID Connect issuer can't be read" in coordinator.log())
