"""The keys and tokens in the state directory: made once, private, and refused if others could change them."""

import datetime
import os
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store
from leasehold_coordinator.access import authority as authority_module
from leasehold_coordinator.access.authorities import open_authorities
from leasehold_coordinator.access.authority import DEFAULT_RULES, LOOPBACK_NAMES, open_authority
from leasehold_coordinator.access.local_tokens import is_bearer, open_tokens
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server.transport import ServerTls, open_state, server_names

SECRETS = ("ca.key", "client.token", "worker.token")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that a coordinator has made."""
    directory = tmp_path / "new/state"
    open_state(directory)
    return directory


def test_the_files_are_private(state: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in state.iterdir()}
    assert modes == {"ca.pem": 0o644, **dict.fromkeys(SECRETS, 0o600)}
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_another_start_finds_the_same(state: Path) -> None:
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    open_state(state)
    assert {path.name: path.read_bytes() for path in state.iterdir()} == before


def test_coordinators_that_start_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as starts:
        found = list(starts.map(lambda _: open_state(tmp_path / "state"), range(16)))
    assert len({tokens for _, tokens in found}) == 1
    assert len({authorities.newest.certificate for authorities, _ in found}) == 1


@pytest.mark.parametrize("name", ["ca.pem", *SECRETS])
def test_a_link_is_not_followed(state: Path, name: str) -> None:
    other = state.parent / "other"
    (state / name).rename(other)
    (state / name).symlink_to(other)
    with pytest.raises(StartError, match=r"can't be created or read"):
        open_state(state)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_that_others_could_read_is_refused(state: Path, name: str) -> None:
    (state / name).chmod(0o640)
    with pytest.raises(StartError, match=f"other users may read .*{name}: run `chmod 600 "):
        open_state(state)


def test_a_certificate_that_others_could_change_is_refused(state: Path) -> None:
    path = state / "ca.pem"
    path.chmod(0o664)
    with pytest.raises(StartError, match=f"other users may change {path}: .* run `chmod 644 {path}`$"):
        open_state(state)


def test_a_directory_of_a_user_with_a_group_of_its_own_is_used(state: Path) -> None:
    """With umask 002, as on Debian and Ubuntu, all directories of an ordinary user are such."""
    for part in (state, state.parent):
        part.chmod(0o775)
    open_state(state)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700, "others may not enter it any more"
    assert stat.S_IMODE(state.parent.stat().st_mode) == 0o775


def test_a_directory_that_others_could_change_is_refused(state: Path) -> None:
    state.chmod(0o777)
    with pytest.raises(StartError, match="other users may change"):
        open_state(state)


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n", b"\xff" * 64, b"two words " * 10 + b"\x07"])
def test_a_file_without_a_token_is_refused(state: Path, content: bytes) -> None:
    (state / "worker.token").write_bytes(content)
    with pytest.raises(StartError, match="holds no token"):
        open_tokens(state)


def test_a_key_that_was_deleted_is_missed(state: Path) -> None:
    """A new one would be of no use: clients have the certificate of the old one."""
    (state / "ca.key").unlink()
    with pytest.raises(
        StartError, match=r"\(ca\.key is missing\): restore them from a backup, or delete both"
    ):
        open_state(state)


def test_a_certificate_that_was_deleted_is_missed(state: Path) -> None:
    """A new one would lock out all workers and users, even with the same key."""
    (state / "ca.pem").unlink()
    with pytest.raises(
        StartError, match=r"\(ca\.pem is missing\): restore them from a backup, or delete both"
    ):
        open_state(state)
    assert not (state / "ca.pem").exists()


def test_an_authority_of_the_future_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority_module, "CLOCK_DIFFERENCE", datetime.timedelta(days=-400))
    with pytest.raises(StartError, match="is not valid yet, by this host's clock"):
        open_state(tmp_path / "state")


def test_what_a_killed_coordinator_left_is_removed(state: Path) -> None:
    left, fresh = state / ".ca.key-0123.new", state / ".ca.key-4567.new"
    for path in (left, fresh):
        path.write_text("a key")
    os.utime(left, (0, 0))
    open_state(state)
    assert not left.exists()
    assert fresh.exists(), "another coordinator may be writing it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_below_one_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(StartError, match="other users may change"):
        open_state(tmp_path / "theirs/state")


@pytest.mark.parametrize("root", ["/", "//", "/proc/.."])
def test_the_root_directory_is_refused_before_any_change(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the root directory would be changed")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StartError, match="is the root directory: choose another directory with --state-dir"):
        open_state(Path(root))


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_a_damaged_authority_is_refused(state: Path, name: str) -> None:
    (state / name).write_bytes(b"-----BEGIN NOTHING-----\n")
    with pytest.raises(StartError, match="no certificate authority"):
        open_state(state)


def test_a_certificate_of_another_key_is_refused(state: Path, tmp_path: Path) -> None:
    open_state(tmp_path / "other")
    (state / "ca.pem").write_bytes((tmp_path / "other/ca.pem").read_bytes())
    with pytest.raises(StartError, match="belongs to another key"):
        open_state(state)


def test_a_certificate_that_a_crash_kept_from_being_written_is_made_from_the_key(state: Path) -> None:
    for path in (state / "ca.pem", *state.glob("*.token")):  # a first start creates the tokens last
        path.unlink()
    key = (state / "ca.key").read_bytes()
    open_state(state)
    assert (state / "ca.key").read_bytes() == key


def test_a_servers_certificate_is_verified_by_its_names(state: Path) -> None:
    authority = open_authority(state)
    issued = authority.issue_server(server_names(["127.0.0.1:7400", "[::1]:7401", "gpu-fleet.example:0"]))
    certificate = x509.load_pem_x509_certificate(issued.chain)
    verify = PolicyBuilder().store(Store([authority.certificate]))
    for name in ("localhost", "gpu-fleet.example"):
        verify.build_server_verifier(x509.DNSName(name)).verify(certificate, [])
    with pytest.raises(x509.verification.VerificationError):
        verify.build_server_verifier(x509.DNSName("other.example")).verify(certificate, [])
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH], (
        "no client can pose as a server, or a server as one"
    )


def test_each_listener_renews_its_certificate_at_half_of_its_life(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authorities = open_authorities(state)
    both = [ServerTls(authorities, frozenset(LOOPBACK_NAMES)) for _ in range(2)]
    server = grpc.server(ThreadPoolExecutor(1))
    ports = [server.add_secure_port("127.0.0.1:0", tls.credentials()) for tls in both]
    server.start()
    try:
        first = [served(port) for port in ports]
        assert [served(port) for port in ports] == first
        monkeypatch.setattr("leasehold_coordinator.server.transport.PRESENT", lambda: both[0].renew_time)
        second = [served(port) for port in ports]
        monkeypatch.undo()
        assert [served(port) for port in ports] == second
    finally:
        server.stop(None)
    assert len({*first, *second}) == 4
    assert DEFAULT_RULES.server_life.days == 90


def served(port: int) -> str:
    """The certificate that a server shows now."""
    return ssl.get_server_certificate(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("authorization", "is_accepted"),
    [
        ("Bearer s3cret", True),
        ("bearer s3cret", True),
        ("Bearer s3cre", False),
        ("s3cret", False),
        ("", False),
    ],
)
def test_a_bearer_token(authorization: str, *, is_accepted: bool) -> None:
    assert is_bearer(authorization, "s3cret") == is_accepted


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(state: Path) -> None:
    os.chown(state / "client.token", 65534, 65534)
    with pytest.raises(StartError, match="not a file of this user"):
        open_state(state)
