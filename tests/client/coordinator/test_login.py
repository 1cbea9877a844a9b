"""Logins that touch no coordinator."""

import hashlib
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from leasehold.v1.enrolment_service_pb2 import JoinTicket
from leasehold_client import contexts
from leasehold_client.contexts import Context, Contexts, locked_contexts, read_contexts
from leasehold_client.coordinator import login as enrolment
from leasehold_client.coordinator.login import login
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError
from leasehold_coordinator.access.authority import open_authority


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_login_replaces_no_context_of_another_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    first, second = (open_authority(_new(tmp_path / name)) for name in ("one", "two"))
    authorities = "" if is_damaged else first.pem.decode()
    before = Context(
        "alice", "user/alice", "one.example:7400", "the key", "the certificate", authorities=authorities
    )
    with locked_contexts() as write:
        write(Contexts("alice", {"alice": before}))
    ticket = JoinTicket(
        address="127.0.0.1:1",
        ca_certificates=[second.certificate.public_bytes(Encoding.DER)],
        secret=b"x" * 32,
        identity="user/alice",
    )
    with pytest.raises(UsageError, match="damaged" if is_damaged else "has another authority"):
        login(ticket, "", "")
    assert read_contexts().get("alice") == before


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it does not begin with leasehold-join-"),
        ("leasehold-join-", "it is incomplete or damaged"),
        ("leasehold-join-AAAAA", "it is incomplete or damaged"),
        ("leasehold-join-CgNh", "it is incomplete or damaged"),
        ("leasehold-join-~", "it is incomplete or damaged"),
    ],
)
def test_a_damaged_join_token_is_refused_in_plain_words(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=rf"^what was given is no join token \({problem}\): copy the whole"):
        enrolment.read_ticket(text)


def ticket_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinTicket:
    """A join token for an address at which nobody listens, in a home without contexts."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    authority = open_authority(_new(tmp_path / "one"))
    return JoinTicket(
        address="127.0.0.1:1",
        ca_certificates=[authority.certificate.public_bytes(Encoding.DER)],
        secret=b"x" * 32,
        identity="user/alice",
    )


@pytest.mark.parametrize(
    ("reason", "kept"), [("JOIN_REFUSED", []), ("", ["alice"]), ("STORAGE_UNAVAILABLE", ["alice"])]
)
def test_a_refused_login_leaves_no_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, kept: list[str]
) -> None:
    """A request that may be stored is sent again by the next login, with its key."""
    ticket = ticket_of_nobody(tmp_path, monkeypatch)

    def refuse(*arguments: object) -> None:
        raise LeaseholdError("the token is used up", reason=reason)

    monkeypatch.setattr(enrolment, "_call", refuse)
    with pytest.raises(LeaseholdError, match="used up"):
        enrolment.login(ticket, "", "")
    assert list(read_contexts().by_name) == kept


def test_a_login_without_an_answer_has_a_remedy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = ticket_of_nobody(tmp_path, monkeypatch)
    with pytest.raises(NoCoordinatorError, match=r"no coordinator answers at 127.0.0.1:1 \(") as error:
        login(ticket, "", "")
    assert error.value.message.endswith(f": {enrolment.UNREACHABLE}")
    assert not error.value.is_sent


@pytest.mark.parametrize(
    ("expire_s", "told"), [(1.0, "in context alice expired"), (9e9, f": {enrolment.NOT_ANSWERED}")]
)
def test_a_used_token_whose_certificate_is_not_accepted_leaves_the_current_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expire_s: float, told: str
) -> None:
    ticket = ticket_of_nobody(tmp_path, monkeypatch)
    [der] = ticket.ca_certificates
    alice = Context(
        "alice",
        "user/alice",
        coordinator="127.0.0.1:1",
        certificate="hers",
        authorities=enrolment.as_pem([der]),
        ticket_digest=hashlib.sha256(ticket.secret).hexdigest(),
        expire_s=expire_s,
    )
    with locked_contexts() as write:
        write(Contexts("bob", {"alice": alice, "bob": Context("bob", "user/bob")}))
    monkeypatch.setattr(enrolment, "context_credentials", lambda context: grpc.ssl_channel_credentials())
    with pytest.raises(LeaseholdError) as error:
        login(ticket, "", "")
    assert told in error.value.message
    assert read_contexts().current == "bob"


def _new(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


def test_a_lock_that_a_stopped_program_holds_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contexts, "LOCK_TIMEOUT_S", 0.1)
    with (
        locked_contexts(),
        pytest.raises(UsageError, match=rf"another program has held .*/{contexts.LOCK_FILE} for 0.1 s"),
        locked_contexts(),
    ):
        pass
    with locked_contexts():
        pass
