"""The user's configuration, and addresses."""

from pathlib import Path

import pytest
from leasehold_client.config import configured_coordinator, parse_address
from leasehold_client.errors import UsageError

from tests.settings_files import UNREADABLE, make_unreadable


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "leasehold").mkdir()
    return tmp_path / "leasehold/cli.toml"


def test_without_a_file_the_defaults_hold(file: Path) -> None:
    assert configured_coordinator() == "127.0.0.1:7400"


def test_the_file_names_the_coordinator(file: Path) -> None:
    file.write_text("coordinator = 'gpu-fleet:7400'\n")
    assert configured_coordinator() == "gpu-fleet:7400"


@pytest.mark.parametrize(
    "text",
    ["coordinater = 'x'", "coordinator = 7400", "coordinator", "coordinator = '\udcff'", "a = " + "[" * 9999],
)
def test_a_file_that_breaks_a_rule_is_refused(file: Path, text: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=f"the configuration {file} is not valid"):
        configured_coordinator()


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    file.mkdir()
    with pytest.raises(UsageError, match="can't be read: Is a directory"):
        configured_coordinator()


@pytest.mark.parametrize("text", ["127.0.0.1:7400", "gpu-fleet.example:1", "[::1]:65535"])
def test_addresses(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "here", ":7400", "here:", "here:port", "here:0", "here:65536", "::1:7400", "here:-1", "here:٣"],
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
