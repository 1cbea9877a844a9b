"""The user's configuration, and addresses."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from leasehold_client import Client, config
from leasehold_client.config import (
    configured_coordinator,
    default_coordinator,
    parse_address,
    require_trusted,
)
from leasehold_client.contexts import Context, Contexts, chosen_coordinator, locked_contexts, read_contexts
from leasehold_client.coordinator.connection import find_coordinator
from leasehold_client.errors import UsageError
from leasehold_client.local import NoWorkerError, worker
from leasehold_client.support import host_parts

from tests.coordinator.unix_users import ANN, call_as, needs_root
from tests.settings_files import UNREADABLE, make_unreadable

VARIABLES = ("LEASEHOLD_COORDINATOR", "LEASEHOLD_CONTEXT", "LEASEHOLD_SOCKET", "LEASEHOLD_CREDENTIALS")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "leasehold").mkdir()
    return tmp_path / "leasehold/cli.toml"


def test_without_a_file_the_defaults_hold(file: Path) -> None:
    assert configured_coordinator() == "127.0.0.1:7400"


def test_a_user_without_a_home_directory_has_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", *VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # no entry of passwd has it
    assert read_contexts() == Contexts()
    assert chosen_coordinator(None, None) == (default_coordinator(), None)
    with pytest.raises(UsageError, match="no home directory: set HOME or XDG_CONFIG_HOME"), locked_contexts():
        pass
    with pytest.raises(NoWorkerError, match=f"no worker listens at {worker.SYSTEM_SOCKET}: start"):
        worker.socket_path()
    assert "cli.toml" not in json.loads(host_parts._settings())


def test_the_file_names_the_coordinator(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    file.write_text("coordinator = 'insecure:gpu-fleet:7400'\n")
    assert configured_coordinator() == "insecure:gpu-fleet:7400"
    with Client() as client:
        assert client.address == "insecure:gpu-fleet:7400"
    assert find_coordinator(None, None) == ("insecure:gpu-fleet:7400", None)  # as AsyncClient does


def test_the_file_may_begin_with_a_byte_order_mark(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfcoordinator = 'host:1'\n")
    assert configured_coordinator() == "host:1"


def test_an_invalid_address_in_the_file_is_told_with_the_file(file: Path) -> None:
    file.write_text("coordinator = 'foo'\n")
    with pytest.raises(UsageError, match=f"^the configuration {file} is not valid: invalid coordinator addr"):
        configured_coordinator()


@pytest.mark.parametrize(
    "text",
    [
        "coordinater = 'x'",
        "coordinator = 7400",
        "coordinator = ''",
        "coordinator",
        "coordinator = '\udcff'",
        "a = " + "[" * 9999,
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(file: Path, text: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=f"the configuration {file} is not valid"):
        configured_coordinator()


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    file.mkdir()
    with pytest.raises(UsageError, match="can't be read: Is a directory"):
        configured_coordinator()


@pytest.mark.parametrize(
    "text", ["127.0.0.1:7400", "gpu-fleet.example:1", "[::1]:65535", "[fe80::1%eth0]:1", "unix:/run/ü s.sock"]
)
def test_addresses(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize("text", ["unix:/a\nb", "unix:/a\x00b", "unix:/" + "a" * 107, "unix:/\udcff"])
def test_what_is_no_path_of_a_socket(text: str) -> None:
    with pytest.raises(UsageError, match="the path of a socket has printable characters, and 107 bytes"):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "here", ":7400", "here:", "here:port", "here:0", "here:65536", "::1:7400", "here:-1", "here:٣"),
        *(
            "he\nre:1",
            "he re:1",
            "he\x00re:1",
            "a,b:1",
            "http://here:1",
            "[here]:1",
            "[::1:1",
            "a" * 254 + ":1",
        ),
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="write HOST:PORT, such as"):
        parse_address(text)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_settings_file_is_a_regular_file_of_bounded_size(file: Path, kind: str) -> None:
    make_unreadable(file, kind)
    rule = "exceeds the limit of 1000000 bytes" if kind == "large" else "is not a regular file"
    with pytest.raises(
        UsageError, match=f"{file} can't be read: it {rule}[^;]*; make it a readable file or remove"
    ):
        configured_coordinator()


def test_contexts_that_are_a_directory_are_named(file: Path) -> None:
    file.with_name("contexts.json").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"contexts\.json is a directory, and contexts are a file: move it"):
        read_contexts()


TLS_FREE = ["unix:/run/one.sock", "insecure:one:7400"]


@pytest.fixture
def contexts(file: Path) -> None:
    """The contexts prod, which is current, and test."""
    kept = read_contexts()
    for name in ("prod", "test"):
        kept = kept.put(Context(name, "user/ann", f"{name}:7400"))
    with locked_contexts() as keep:
        keep(replace(kept, current="prod"))


def names(address: str | None, context: str | None) -> tuple[str, str]:
    """The address that is called, and the context in use. Empty: none."""
    called, found = chosen_coordinator(address, context)
    return called, found.name if found is not None else ""


@pytest.mark.parametrize("address", TLS_FREE)
@pytest.mark.usefixtures("contexts")
def test_a_context_that_is_named_beside_an_address_without_tls_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = f"the context 'test' is for TLS, and {address} is without: leave one of them out"
    with pytest.raises(UsageError, match=match):
        chosen_coordinator(address, "test")
    with pytest.raises(UsageError, match=match):
        Client(address, context="test")
    monkeypatch.setenv("LEASEHOLD_CONTEXT", "test")
    assert names(address, None) == (address, ""), "a variable is for all calls, and does not concern this one"


@pytest.mark.usefixtures("contexts")
def test_an_option_counts_before_the_variable_and_the_variable_before_the_current_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert names(None, None) == ("prod:7400", "prod")
    assert names("other:7400", None) == ("other:7400", "")
    monkeypatch.setenv("LEASEHOLD_CONTEXT", "test")
    assert names(None, None) == ("test:7400", "test")
    assert names("other:7400", None) == ("other:7400", "test")
    assert names(None, "prod") == ("prod:7400", "prod")
    monkeypatch.setenv("LEASEHOLD_COORDINATOR", "unix:/run/one.sock")
    assert names(None, None) == ("unix:/run/one.sock", "")
    assert names("other:7400", None) == ("other:7400", "test")
    assert names(None, "prod") == ("prod:7400", "prod"), "an option counts before a variable"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The socket of a host's coordinator, which another Unix user serves in its directory."""
    folder = tmp_path / "run"
    folder.mkdir(0o755)
    path = folder / "coordinator.sock"
    monkeypatch.setattr(config, "SYSTEM_SOCKET", path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        call_as(ANN, listener.listen)
        yield path


@needs_root
def test_the_owner_of_the_systems_directory_serves_its_socket(served: Path, file: Path) -> None:
    with pytest.raises(UsageError, match=f"served by the Unix user {ANN}"):
        configured_coordinator()
    os.chown(served.parent, ANN, -1)
    assert configured_coordinator() == f"unix:{served}"
    served.parent.chmod(0o775)
    with pytest.raises(UsageError, match="and not by root or this user"):
        require_trusted(str(served))


@needs_root
def test_another_users_socket_elsewhere_is_refused(
    served: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(served.parent, ANN, -1)
    monkeypatch.setattr(config, "SYSTEM_SOCKET", served.with_name("other.sock"))
    with pytest.raises(UsageError, match=f"served by the Unix user {ANN}"):
        require_trusted(str(served))
