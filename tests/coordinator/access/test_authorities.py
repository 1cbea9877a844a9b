"""The CAs of a state directory during a rotation, also one that a crash interrupts."""

import datetime
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from leasehold_coordinator.access.authorities import Authorities, open_authorities
from leasehold_coordinator.access.authority import (
    CERTIFICATE_FILE,
    DEFAULT_RULES,
    KEY_FILE,
    NEXT_KEY_FILE,
    Authority,
    create_authority,
)
from leasehold_coordinator.errors import StartError


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return open_authorities(tmp_path)


def on_disk(folder: Path) -> list[str]:
    """The serial numbers that a start finds."""
    return [member.serial for member in open_authorities(folder).members]


def test_a_second_authority_signs_for_clients_and_the_first_for_the_server(
    tmp_path: Path, authorities: Authorities
) -> None:
    first, added = authorities.newest, authorities.add()
    assert authorities.members == (first, added)
    assert (authorities.newest, authorities.server) == (added, first)
    assert on_disk(tmp_path) == [first.serial, added.serial]
    assert len(x509.load_pem_x509_certificates((tmp_path / CERTIFICATE_FILE).read_bytes())) == 2
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {CERTIFICATE_FILE: 0o644, KEY_FILE: 0o600, NEXT_KEY_FILE: 0o600}
    authorities.serve_newest()
    assert authorities.server is added
    assert first.certificate.subject != added.certificate.subject, "a verifier finds issuers by name"


def test_either_of_two_can_be_retired(tmp_path: Path, authorities: Authorities) -> None:
    first, second = authorities.newest, authorities.add()
    authorities.remove(second.serial)
    assert on_disk(tmp_path) == [first.serial]
    third = authorities.add()
    authorities.remove(first.serial)
    assert authorities.members == (third,)
    assert on_disk(tmp_path) == [third.serial]
    assert {path.name for path in tmp_path.iterdir()} == {CERTIFICATE_FILE, KEY_FILE}
    fourth = authorities.add()
    assert on_disk(tmp_path) == [third.serial, fourth.serial]


def test_a_crash_leaves_the_state_before_or_after(tmp_path: Path, authorities: Authorities) -> None:
    first = authorities.newest
    certificates, key = tmp_path / CERTIFICATE_FILE, tmp_path / KEY_FILE
    before, first_key = certificates.read_bytes(), key.read_bytes()
    second = authorities.add()
    both, second_key = certificates.read_bytes(), (tmp_path / NEXT_KEY_FILE).read_bytes()
    certificates.write_bytes(before)  # before the end of the rotation, or after the end of its undoing
    assert on_disk(tmp_path) == [first.serial]
    assert not (tmp_path / NEXT_KEY_FILE).exists()
    (tmp_path / NEXT_KEY_FILE).touch(0o600)
    (tmp_path / NEXT_KEY_FILE).write_bytes(second_key)
    certificates.write_bytes(both)
    assert on_disk(tmp_path) == [first.serial, second.serial]
    certificates.write_bytes(second.pem)  # in the midst of retiring the first
    assert key.read_bytes() == first_key
    assert on_disk(tmp_path) == [second.serial]
    assert key.read_bytes() == second_key


def test_a_second_key_that_others_could_read_is_refused(tmp_path: Path, authorities: Authorities) -> None:
    authorities.add()
    (tmp_path / NEXT_KEY_FILE).chmod(0o644)
    with pytest.raises(StartError, match=r"other users may read .* run `chmod 600 "):
        open_authorities(tmp_path)


def rotated(folder: Path, *, is_second_expired: bool = False) -> tuple[Authority, Authority]:
    """A CA that has expired, and a second one that a rotation has added."""
    expired_rules = DEFAULT_RULES._replace(authority_life=datetime.timedelta(minutes=-1))
    first = create_authority(folder / KEY_FILE, expired_rules)
    second_rules = expired_rules if is_second_expired else DEFAULT_RULES
    second = Authorities(folder, (replace(first, rules=second_rules),)).add()
    return first, second


def test_an_expired_first_authority_is_retired_at_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = rotated(tmp_path)
    second_key = (tmp_path / NEXT_KEY_FILE).read_bytes()
    assert on_disk(tmp_path) == [second.serial]
    assert {path.name for path in tmp_path.iterdir()} == {CERTIFICATE_FILE, KEY_FILE}
    assert (tmp_path / CERTIFICATE_FILE).read_bytes() == second.pem
    assert (tmp_path / KEY_FILE).read_bytes() == second_key
    assert f"{first.serial} has expired and is retired: {second.serial} remains" in caplog.text


def test_the_advice_for_two_expired_authorities_names_all_files(tmp_path: Path) -> None:
    rotated(tmp_path, is_second_expired=True)
    with pytest.raises(StartError, match=r"expired.* delete ca\.key, ca\.pem and ca-next\.key, and new ones"):
        open_authorities(tmp_path)
    for name in (KEY_FILE, CERTIFICATE_FILE):
        (tmp_path / name).unlink()
    with pytest.raises(StartError, match=r"ca\.pem is missing.* delete ca\.key, ca\.pem and ca-next\.key"):
        open_authorities(tmp_path)
    (tmp_path / NEXT_KEY_FILE).unlink()
    assert len(on_disk(tmp_path)) == 1
