"""How a coordinator starts and stops: one line says what is wrong, and nothing holds it up."""

import json
import os
import re
import resource
import signal
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from leasehold.v1.fleet_service_pb2 import WatchFleetRequest
from leasehold.worker.v1 import session_pb2
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server.config import load_config
from leasehold_coordinator.storage.database import file_of_database
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.storage.store_file import unusable

from tests.coordinator.conftest import CoordinatorProcess, run_coordinator
from tests.coordinator.scripted_worker import ScriptedWorker
from tests.settings_files import UNREADABLE, make_unreadable


def refused(*arguments: str) -> str:
    """The one line of a coordinator that can't start."""
    done = run_coordinator(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.fullmatch(r"leasehold coordinator: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"listen = ", "is malformed"),
        (b'listen = "\xff"', r"\.toml is not UTF-8 \(byte 11\): write it as UTF-8$"),
        (b'log_level = "loud"', "unknown log level 'loud': give one of debug, info, warning, error"),
        (
            b'load_interval_s = "soon"',
            r"of load_interval_s: expected a number, got text \(see docs/cli.md#settings",
        ),
        (
            b"load_interval = 1",
            r"\.toml has the unknown key 'load_interval': did you mean 'load_interval_s'\?",
        ),
        (b"zzz = 1", r"the unknown key 'zzz': remove it \(docs/cli.md#settings lists the keys\)"),
        (b"load_interval_s = nan", "load_interval_s nan is out of range: give 0.05 to 3600 seconds"),
        (b"retention_s = 1e300", r"retention_s 1e\+300 is out of range: give 60 to 1000000000 seconds"),
        (b"audit_retention_days = 1e9", r"audit_retention_days 1e\+09 is out of range: give 1 to 36500 days"),
        (b"caller_streams = 0", "caller_streams 0 is out of range: give 1 to 1000000$"),
        (b"caller_requests_per_s = inf", "caller_requests_per_s inf is out of range: give 1 to 1000000$"),
        (b'listen = ":7400"', "is not HOST:PORT"),
    ],
)
def test_a_configuration_that_cannot_be_used(tmp_path: Path, text: bytes, match: str) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_bytes(text)
    with pytest.raises(StartError, match=match):
        load_config(file)


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_bytes(b"\xef\xbb\xbfload_interval_s = 2.5\n")
    assert load_config(file).load_interval_s == 2.5


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    assert "can't be read: Is a directory" in refused("--config", str(tmp_path))


def test_a_refusal_has_no_terminal_codes(tmp_path: Path) -> None:
    file = tmp_path / "\x1b]0;owned\x07.toml"
    assert "\\x1b]0;owned\\x07.toml can't be read" in refused("--config", str(file))


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('listen = "127.0.0.1:1"\nload_interval_s = 2.5\n')
    config = load_config(file, listen="127.0.0.1:2", database=None)
    assert (config.listen, config.load_interval_s, config.log_level) == ("127.0.0.1:2", 2.5, "info")


@pytest.mark.parametrize(
    "name",
    [
        *("bücher.example", "head:7400", "10.0.0.5:7400", "[::1]", "fe80::1%eth0", "*.example.com", ""),
        *("head.example.", "a..b", "-head", "10.0.0.256", "two words", "head\n", "a" * 64, "https://head"),
    ],
)
def test_a_server_name_that_no_certificate_can_have_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text(f'server_names = ["head.example", {json.dumps(name)}]\n')
    with pytest.raises(StartError) as error:
        load_config(file)
    assert f"server_names has {name!r}, which is not a DNS name or an IP address: write it" in str(
        error.value
    )


def test_names_and_addresses_are_server_names(tmp_path: Path) -> None:
    names = [
        "head",
        "Head-1.example.com",
        "gpu_head",
        "1.example",
        "xn--bcher-kva.example",
        "10.0.0.5",
        "::1",
    ]
    file = tmp_path / "coordinator.toml"
    file.write_text(f"server_names = {json.dumps(names)}\n")
    assert load_config(file).server_names == names


def test_an_empty_state_directory_is_not_the_present_directory(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('state_dir = ""\n')
    with pytest.raises(StartError, match="state_dir is empty: give a path, or leave it out"):
        load_config(file)
    assert load_config(file, state_dir="/srv/leasehold").state_dir == "/srv/leasehold"


@pytest.mark.parametrize("url", ["mysqlx://nowhere", "postgresql+nodriver://nowhere", "sqlite://no/host"])
def test_a_database_that_nobody_can_open(url: str) -> None:
    with pytest.raises(StartError, match="can't be used"):
        Store.open(url)


@pytest.mark.parametrize(
    ("why", "free_bytes", "told"),
    [
        ("disk I/O error", 2**20 - 1, "its disk has less than 1 MiB free: free space, and start again"),
        ("disk I/O error", 2**20, "correct this, or name another with --database (a new one has no"),
        ("another coordinator uses it", 0, "correct this, or name another with --database (a new one has no"),
    ],
)
def test_a_full_disk_is_told_and_no_other_database_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, free_bytes: int, told: str
) -> None:
    """A start with a new store would lose roles and workloads."""
    path = tmp_path / "store.sqlite3"
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
    assert str(unusable(path, why)).startswith(f"the database {path} can't be used: {why}; {told}")


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+nodriver", "mysqlx"])
def test_the_password_of_a_database_is_not_told(scheme: str) -> None:
    line = refused("--database", f"{scheme}://leasehold:hunter2@db.invalid:5432/store?sslpassword=hunter2")
    assert f"the database {scheme}://leasehold:***@db.invalid:5432/store can't be used" in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    "rest",
    [
        "@db.invalid:54x2/store",
        "@[::1/store",
        "@2@db.invalid/store",
        "@2:3@db.invalid/store",
        "@d/2@db/store",
    ],
)
def test_a_malformed_url_of_a_database_is_one_line_without_it(rest: str) -> None:
    url = f"postgresql://leasehold:hunter{rest}"
    line = refused("--database", url)
    assert "the URL of the database is malformed" in line
    assert not any(part in line for part in ("hunter", "2@", "54x2", "leasehold:"))
    with pytest.raises(StartError, match="the URL of the database is malformed"):
        file_of_database(url)


def test_a_host_that_nobody_knows_is_one_line(tmp_path: Path) -> None:
    options = ["--listen", "no.such.host.invalid:0", "--database", str(tmp_path / "store.sqlite3")]
    assert "can't listen on no.such.host.invalid:0" in refused(*options)


def test_a_port_in_use_is_one_line(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    options = ["--listen", coordinator.address, "--database", str(tmp_path / "other.sqlite3")]
    assert "the port is in use" in refused(*options)


def test_a_store_in_use_is_one_line(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    options = ["--listen", "127.0.0.1:0", "--database", str(tmp_path / "store.sqlite3")]
    assert "another coordinator uses it" in refused(*options)


def test_a_store_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(str(path)).close()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(StartError, match="can't be used"):
        Store.open(str(path))


def test_a_stop_waits_for_nobody_who_watches(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    watch_health: grpc.UnaryStreamMultiCallable[
        health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    ] = coordinator.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    watching = watch_health(health_pb2.HealthCheckRequest(service=""), timeout=30)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    fleet = coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=30)
    assert next(fleet).worker.name == "alpha"
    assert coordinator.end(signal.SIGTERM) == 0
    assert worker.wait_end().goodbye.reason == session_pb2.GOODBYE_REASON_SHUTDOWN
    watching.cancel()
    fleet.cancel()


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_settings_file_is_a_regular_file_of_bounded_size(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "coordinator.toml"
    make_unreadable(file, kind)
    rule = "has more than 1000000 bytes" if kind == "large" else "is not a regular file"
    with pytest.raises(StartError, match=f"{file} can't be read: it {rule}[^;]*; give another with --config"):
        load_config(file)


def test_connections_are_not_bounded_by_the_soft_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    coordinator = CoordinatorProcess(tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        coordinator.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = Path(f"/proc/{coordinator.process.pid}/limits").read_text()
    found = re.search(r"^Max open files +(\d+)", limits, re.MULTILINE)
    assert coordinator.end(signal.SIGTERM) == 0
    assert found
    assert int(found[1]) == min(hard, 65_536) > 256


OIDC = 'oidc_listen = "127.0.0.1:0"\n[oidc]\nissuer = "i"\naudience = "a"\n'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('oidc_listen = "127.0.0.1:0"', "give both or none"),
        ('[oidc]\nissuer = "i"\naudience = "a"', "give both or none"),
        (OIDC.replace('"a"', '""'), "audience is empty"),
        (OIDC + 'prefix = "oidc:"', "prefix 'oidc:' can't begin a name"),
        (OIDC, "jwks_url or jwks_file: give one of them"),
        (OIDC + 'jwks_url = "https://h/k"\njwks_file = "k"', "give one of them"),
        (OIDC + 'jwks_url = "http://h/k"', "has no TLS, so others could serve keys"),
        (OIDC + 'jwks_file = "k"\nroles = { "x" = "root" }', "give one of viewer, user, operator, admin"),
        (OIDC + 'jwks_file = "k"\nroles = { "x" = "user" }', r"needs oidc\.role_claim"),
        (OIDC + "audiences = 1", "unknown key 'audiences' in the table oidc: did you mean 'audience'"),
        ("oidc = 1", "value of oidc: expected a table or nothing, got a whole number"),
    ],
)
def test_an_issuer_that_cannot_be_used(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text(text)
    with pytest.raises(StartError, match=match):
        load_config(file)


def test_a_key_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("{}")
    file = tmp_path / "coordinator.toml"
    file.write_text(f'{OIDC}jwks_file = "{keys}"')
    options = ["--config", str(file), "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]
    options += ["--database", str(tmp_path / "store.sqlite3")]
    assert f"the keys in {keys} can't be used (it has no list of keys): correct oidc.jwks_file" in refused(
        *options
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"listen": "localhost:7400", "worker_listen": "[::1]:7401"}, ""),
        ({"listen": "0.0.0.0:7400"}, "0.0.0.0:7402"),
        ({"worker_listen": "[2001:db8::1]:7401"}, "[2001:db8::1]:7402"),
        ({"listen": "0.0.0.0:0"}, "0.0.0.0:0"),
        ({"listen": "0.0.0.0:7400", "insecure": True}, ""),
        ({"join_listen": "10.0.0.1:1"}, "10.0.0.1:1"),
    ],
)
def test_enrolment_is_beside_a_listener_off_loopback(settings: dict[str, Any], expected: str) -> None:
    assert load_config(None, **settings).join_address == expected


def test_without_tls_nobody_enrols() -> None:
    with pytest.raises(StartError, match="leave out join_listen"):
        load_config(None, insecure=True, join_listen="0.0.0.0:7402")
