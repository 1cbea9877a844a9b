"""Values that are encrypted at rest, and digests that can't be guessed."""

from pathlib import Path

import pytest
from leasehold_coordinator.access.secret_vault import SealError, SecretVault, open_vault
from leasehold_coordinator.errors import StartError


def test_a_value_is_bound_to_its_workload_and_its_name(tmp_path: Path) -> None:
    vault = open_vault(tmp_path)
    sealed = vault.seal("w-1", "TOKEN", "välue\n")
    assert vault.reveal("w-1", "TOKEN", sealed) == "välue\n"
    assert vault.seal("w-1", "TOKEN", "välue\n") != sealed
    assert open_vault(tmp_path).reveal("w-1", "TOKEN", sealed) == "välue\n"
    for workload_id, name, text in (("w-2", "TOKEN", sealed), ("w-1", "OTHER", sealed), ("w-1", "TOKEN", "")):
        with pytest.raises(SealError):
            vault.reveal(workload_id, name, text)
    with pytest.raises(SealError):
        SecretVault(bytes(32), bytes(32)).reveal("w-1", "TOKEN", sealed)


def test_digests_differ_by_key() -> None:
    one, other = SecretVault(bytes(32), b"1" * 32), SecretVault(bytes(32), b"2" * 32)
    assert one.digest(b"request") == one.digest(b"request")
    assert one.digest(b"request") != other.digest(b"request")


def test_keys_are_private_and_whole(tmp_path: Path) -> None:
    open_vault(tmp_path)
    keys = sorted((tmp_path / "keys").iterdir())
    assert [path.name for path in keys] == ["environment.key", "requests.key"]
    assert [path.stat().st_mode & 0o777 for path in keys] == [0o600] * 2
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    keys[0].chmod(0o644)
    with pytest.raises(StartError, match="run `chmod 600 "):
        open_vault(tmp_path)
    keys[0].chmod(0o600)
    keys[0].write_bytes(b"short")
    with pytest.raises(StartError, match="5 bytes"):
        open_vault(tmp_path)
