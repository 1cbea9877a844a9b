"""Who gets a certificate: by a join token, and by the certificate before."""

import asyncio
import base64
import datetime
import json
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding
from leasehold.v1 import access_service_pb2, errors_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_ALLOWED, AUDIT_OUTCOME_REFUSED
from leasehold.v1.enrolment_service_pb2 import (
    CreateJoinTokenRequest,
    JoinRequest,
    JoinTicket,
    RenewCertificateRequest,
    UnbindGpuRequest,
)
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.fleet_service_pb2 import DeleteWorkerRequest
from leasehold_coordinator.access.authorities import open_authorities
from leasehold_coordinator.access.authority import IssueRules
from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.certificates import CertificateRegistry, Revocation
from leasehold_coordinator.access.identities import Identity, Kind, parse_identity
from leasehold_coordinator.access.join_tokens import TICKET_PREFIX
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.commands import enrolment, join_requests, join_tokens
from leasehold_coordinator.commands.decisions import Decisions
from leasehold_coordinator.commands.enrolment import Enrolment
from leasehold_coordinator.commands.join_tokens import JoinTokenChanges
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.caller_bounds import CallerBounds, CallerLimits
from leasehold_coordinator.fleet.callers import note_caller, note_request
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.revocations import Revocations
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.enrolment_rows import join_token_row
from leasehold_coordinator.storage.rows import Change, Row
from leasehold_coordinator.storage.store import Store

from tests.coordinator.bench import FULL, VAULT
from tests.coordinator.pages import all_events
from tests.coordinator.scripted_worker import make_hello
from tests.coordinator.storage.test_audit_chain import listed
from tests.fuzz.messages import fill

REFUSED = errors_pb2.ERROR_REASON_JOIN_REFUSED


def signing_request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None) -> bytes:
    """A new signing request with a key, or a new one. The name is the nonce, and what is not believed."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.COMMON_NAME, "local/root"),
            x509.NameAttribute(x509.NameOID.SERIAL_NUMBER, secrets.token_hex(16)),
        ]
    )
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.DER)


CSR = signing_request()


class Office:
    """Enrolment on a real store, without a server."""

    def __init__(self, store: Store, folder: Path) -> None:
        rules = IssueRules("leasehold", client_life=datetime.timedelta(days=30))
        self.authorities = open_authorities(folder, rules)
        self.store = store
        self.fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        self.certificates = ClientCertificates(store, self.authorities, CertificateRegistry())
        self.bindings = Bindings()
        self.tokens = JoinTokenChanges(self.fleet, lambda: [b"the CA"], self.is_admin)
        self.tokens.address = "coordinator.example:7402"
        self.tokens.kinds = frozenset({Kind.WORKER, Kind.USER, Kind.SERVICE})
        self.enrolment = Enrolment(self.fleet, self.certificates, lambda: [b"the CA"], self.is_admin)
        self.enrolment.addresses = dict.fromkeys(Kind, "coordinator.example:7400")

    def is_admin(self, identity: str) -> bool:
        """Whether an identity is an admin. Tokens without a creator are those of the coordinator's user."""
        return not identity or self.bindings.has_role(identity, Role.ADMIN)

    async def load(self) -> None:
        await self.fleet.load()
        await self.certificates.load()

    async def token(self, identity: str, *, uses: int = 1, replace: bool = False) -> bytes:
        """The secret of a new token."""
        request = CreateJoinTokenRequest(identity=identity, uses=uses, replace=replace)
        return read_ticket((await self.tokens.create(request)).ticket).secret

    async def join(
        self,
        secret: bytes,
        identity: str = "worker/alpha",
        csr: bytes = b"",
        *,
        worker_id: str = "worker-alpha",
        gpus: tuple[str, ...] = (),
        address: str = "ipv4:192.0.2.1",
    ) -> bytes:
        """The certificate that a join gets."""
        request = JoinRequest(
            secret=secret,
            identity=identity,
            csr=csr or signing_request(),
            worker_id=worker_id,
            gpu_uuids=gpus,
        )
        return (await self.enrolment.join(request, address)).certificate.certificate

    async def refuse(self, reason: ErrorReason.ValueType, work: Awaitable[object]) -> FleetError:
        """Awaits work that must be refused for a reason."""
        with pytest.raises(FleetError) as refusal:
            await work
        assert refusal.value.reason == reason, refusal.value.message
        return refusal.value

    def caller(self, certificate: bytes) -> Caller:
        """The caller with a certificate."""
        serial = f"{x509.load_der_x509_certificate(certificate).serial_number:x}"
        known = self.certificates.registry.get(serial)
        assert known is not None
        return Caller(known.identity, "ipv4:192.0.2.1", serial=serial, expire_time=known.not_after)


def read_ticket(text: str) -> JoinTicket:
    """A ticket from its text."""
    data = text.removeprefix(TICKET_PREFIX)
    return JoinTicket.FromString(base64.urlsafe_b64decode(data + "=" * (-len(data) % 4)))


def in_office(folder: Path, *scenarios: Callable[[Office], Awaitable[None]]) -> None:
    """Plays each scenario on a coordinator of its own, one after the other on the same store."""

    async def run(scenario: Callable[[Office], Awaitable[None]]) -> None:
        store = Store.open(str(folder / "store.sqlite3"))
        try:
            office = Office(store, folder)
            await office.load()
            await scenario(office)
        finally:
            store.close()

    for scenario in scenarios:
        asyncio.run(run(scenario))


def names(certificate: bytes) -> list[str]:
    """The URIs in a certificate."""
    found = x509.load_der_x509_certificate(certificate).extensions
    alternatives = found.get_extension_for_class(x509.SubjectAlternativeName).value
    return alternatives.get_values_for_type(x509.UniformResourceIdentifier)


def test_a_stolen_token_is_worth_nothing_once_it_was_used(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        secret, key = await office.token("worker/alpha"), ec.generate_private_key(ec.SECP256R1())
        first = await office.join(secret, csr=signing_request(key), gpus=("GPU-1",))
        assert names(first) == ["leasehold://leasehold/worker/alpha"]
        again = await office.join(secret, csr=signing_request(key), gpus=("GPU-1",))
        assert again == first, "the answer may have been lost"
        used = await office.refuse(REFUSED, office.join(secret))
        unknown = await office.refuse(REFUSED, office.join(b"x" * 32))
        assert used.message == unknown.message
        binding = office.fleet.bindings.get("alpha")
        assert binding is not None
        assert (binding.worker_id, binding.gpu_uuids) == ("worker-alpha", frozenset({"GPU-1"}))

    in_office(tmp_path, scenario)


def test_all_of_it_outlives_the_coordinator(tmp_path: Path) -> None:
    kept: list[bytes] = []
    key = ec.generate_private_key(ec.SECP256R1())
    requests = [signing_request(key) for _ in range(2)]

    async def before(office: Office) -> None:
        kept.append(await office.token("worker/alpha"))
        kept.append(await office.join(kept[0], csr=requests[0], gpus=("GPU-1", "GPU-2")))
        await office.join(kept[0], csr=requests[1])

    async def after(office: Office) -> None:
        for csr in requests:
            await office.refuse(REFUSED, office.join(kept[0], csr=csr))
        assert await office.join(kept[0], csr=signing_request(key)) == kept[1]
        await office.refuse(REFUSED, office.join(kept[0]))
        assert office.fleet.bindings.of_gpu("GPU-2") == office.fleet.bindings.get("alpha")

    in_office(tmp_path, before, after)
    assert kept[0] not in (tmp_path / "store.sqlite3").read_bytes()


def resigned(csr: bytes) -> bytes:
    """The same request with the second valid signature, which everybody can make from the first one."""
    request = x509.load_der_x509_csr(csr)
    r, s = decode_dss_signature(request.signature)
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    signature = b"\x00" + encode_dss_signature(r, order - s)
    algorithm = bytes.fromhex("300a06082a8648ce3d040302")  # ecdsa-with-SHA256
    body = request.tbs_certrequest_bytes + algorithm + bytes([3, len(signature)]) + signature
    length = [0x81, len(body)] if len(body) < 256 else [0x82, *len(body).to_bytes(2)]
    return bytes([0x30, *length]) + body


def test_a_replayed_request_is_refused_and_audited(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        secret, key = await office.token("worker/a*", uses=2), ec.generate_private_key(ec.SECP256R1())
        csr = signing_request(key)
        other = resigned(csr)
        assert x509.load_der_x509_csr(other).is_signature_valid
        assert other != csr
        first = await office.join(secret, "worker/alpha", csr=csr)
        for replayed in (csr, other):
            for identity in ("worker/alpha", "worker/anna"):
                error = await office.refuse(REFUSED, office.join(secret, identity, csr=replayed))
                assert error.message == (
                    f"the certificate request of {identity} was sent before, and each one is accepted once: "
                    "join again, which signs a new request with the same key"
                )
        assert await office.join(secret, "worker/alpha", csr=signing_request(key)) == first
        await office.fleet.audit.flush(is_last=True)
        joined, repeated, refused = (
            entry for entry in await listed(office.store) if entry.method == enrolment.JOIN
        )
        for entry in (joined, repeated):
            assert (entry.identity, entry.outcome) == ("worker/alpha", AUDIT_OUTCOME_ALLOWED)
        assert (refused.outcome, refused.reason, refused.count) == (AUDIT_OUTCOME_REFUSED, REFUSED, 4)
        assert refused.message.startswith("the certificate request of worker/alpha was sent before")
        assert {"identity/worker/alpha", "identity/worker/anna"} <= set(refused.resource.split(", "))
        assert office.tokens.all()[0].uses_left == 1

    in_office(tmp_path, scenario)


def test_the_requests_of_a_key_are_bounded(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        secret, key = await office.token("user/a*", uses=2), ec.generate_private_key(ec.SECP256R1())
        issued = {
            await office.join(secret, "user/anna", csr=signing_request(key))
            for _ in range(join_requests.REQUEST_LIMIT)
        }
        assert len(issued) == 1
        error = await office.refuse(REFUSED, office.join(secret, "user/anna", csr=signing_request(key)))
        assert "16 certificate requests" in error.message
        assert "leasehold token create --user anna --replace" in error.message
        await office.join(secret, "user/arno")

    in_office(tmp_path, scenario)


def test_a_request_whose_repetition_was_not_stored_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(office: Office) -> None:
        secret, key = await office.token("worker/alpha"), ec.generate_private_key(ec.SECP256R1())
        first, again = await office.join(secret, csr=signing_request(key)), signing_request(key)

        async def fail(*_: object) -> None:
            raise FULL

        with monkeypatch.context() as patched:
            patched.setattr(office.store, "write", fail)
            await office.refuse(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, office.join(secret, csr=again))
        assert await office.join(secret, csr=again) == first

    in_office(tmp_path, scenario)


def test_a_join_of_an_older_version_has_no_requests(tmp_path: Path) -> None:
    secret, key = b"x" * 32, ec.generate_private_key(ec.SECP256R1())
    issued: list[bytes] = []

    async def before(office: Office) -> None:
        nonlocal secret
        secret = await office.token("worker/alpha")
        issued.append(await office.join(secret, csr=signing_request(key)))
        (stored,) = office.fleet.join_tokens
        row = join_token_row(stored)
        row.values["joins"] = row.values["joins"].rpartition(":")[0]
        await office.store.write(row)

    async def after(office: Office) -> None:
        assert await office.join(secret, csr=signing_request(key)) == issued[0]

    in_office(tmp_path, before, after)


def test_an_expired_or_deleted_token_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(office: Office) -> None:
        deleted = await office.token("worker/alpha")
        await office.tokens.delete(office.tokens.all()[0].join_token_id)
        await office.refuse(REFUSED, office.join(deleted))
        expired, key = await office.token("worker/alpha"), ec.generate_private_key(ec.SECP256R1())
        await office.join(expired, csr=signing_request(key))
        monkeypatch.setattr(Store, "highest_time_ns", office.store.highest_time_ns + 3601 * 10**9)
        await office.refuse(REFUSED, office.join(expired, csr=signing_request(key)))
        assert office.tokens.all() == []

    in_office(tmp_path, scenario)


def test_a_deletion_that_was_not_stored_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(office: Office) -> None:
        secret = await office.token("worker/alpha")
        (token,) = office.tokens.all()

        async def fail(*_: object) -> None:
            raise FULL

        with monkeypatch.context() as patched:
            patched.setattr(office.store, "write", fail)
            for _ in range(2):
                refusal = await office.refuse(
                    errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, office.tokens.delete(token.join_token_id)
                )
                assert "only until the coordinator restarts" in refusal.message
        await office.refuse(REFUSED, office.join(secret))
        assert await office.tokens.delete(token.join_token_id) == token
        await office.refuse(
            errors_pb2.ERROR_REASON_UNKNOWN_JOIN_TOKEN, office.tokens.delete(token.join_token_id)
        )

    async def after(office: Office) -> None:
        assert not list(office.fleet.join_tokens)

    in_office(tmp_path, before, after)


def test_an_expired_token_whose_deletion_was_not_stored_is_deleted_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(office: Office) -> None:
        await office.token("worker/alpha")
        (token,) = office.tokens.all()

        async def fail(*_: object) -> None:
            raise FULL

        with monkeypatch.context() as patched:
            patched.setattr(office.store, "write", fail)
            await office.refuse(
                errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, office.tokens.delete(token.join_token_id)
            )
        monkeypatch.setattr(Store, "highest_time_ns", office.store.highest_time_ns + 3601 * 10**9)
        await office.token("worker/beta")
        (row,) = await office.store.all_rows(schema.join_tokens)
        assert row.join_token_id != token.join_token_id

    in_office(tmp_path, scenario)


def test_a_token_ends_with_the_role_of_its_creator(tmp_path: Path) -> None:
    eve = Identity(Kind.USER, "eve")
    admin = RoleBinding(identity=str(eve), role=access_service_pb2.ROLE_ADMIN)

    async def scenario(office: Office) -> None:
        note_caller(Caller(eve, "", role=Role.ADMIN))
        office.bindings.put(admin)
        secret, other = await office.token("user/boss", replace=True), await office.token("user/b")
        office.bindings.remove(admin)
        await office.refuse(REFUSED, office.join(secret, "user/boss", worker_id=""))
        office.bindings.put(admin)
        office.certificates.registry.revoke(Revocation(str(eve), "local/root", 1))
        await office.refuse(REFUSED, office.join(secret, "user/boss", worker_id=""))
        office.certificates.registry.restore(str(eve))
        await office.join(secret, "user/boss", worker_id="")
        await office.join(other, "user/b", worker_id="")

    in_office(tmp_path, scenario)


def test_a_token_of_an_admin_by_claim_ends_with_a_block(tmp_path: Path) -> None:
    eve = Identity(Kind.USER, "oidc-eve")

    async def scenario(office: Office) -> None:
        note_caller(Caller(eve, "", claimed_role=Role.ADMIN, role=Role.ADMIN))
        secret, other = await office.token("user/a"), await office.token("user/b")
        await office.join(secret, "user/a", worker_id="")
        office.certificates.registry.revoke(Revocation(str(eve), "local/root", 1))
        await office.refuse(REFUSED, office.join(other, "user/b", worker_id=""))

    in_office(tmp_path, scenario)


@pytest.mark.parametrize(
    "identity", ["worker/beta", "user/alpha", "local/alpha", "worker/alpha/x", "worker/*", ""]
)
def test_a_token_is_for_its_name_only(tmp_path: Path, identity: str) -> None:
    async def scenario(office: Office) -> None:
        secret = await office.token("worker/alpha")
        with pytest.raises(FleetError):
            await office.join(secret, identity)
        assert not list(office.certificates.registry)
        await office.join(secret)

    in_office(tmp_path, scenario)


@pytest.mark.parametrize(
    ("identity", "fields"),
    [
        ("local/*", {}),
        ("*", {}),
        ("worker/[a]*", {}),
        ("worker/a@b", {}),
        ("user/", {}),
        ("worker/gpu-*", {"replace": True}),
        ("worker/gpu-1", {"uses": 2}),
        ("worker/gpu-*", {"uses": 257}),
    ],
)
def test_no_token_for_others(tmp_path: Path, identity: str, fields: dict[str, int]) -> None:
    async def scenario(office: Office) -> None:
        await office.refuse(
            errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
            office.tokens.create(CreateJoinTokenRequest(identity=identity, **fields)),  # type: ignore[arg-type]
        )

    in_office(tmp_path, scenario)


def test_a_pattern_is_for_several_names_once_each(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        secret = await office.token("user/a*", uses=2)
        await office.join(secret, "user/alice", worker_id="")
        await office.refuse(
            errors_pb2.ERROR_REASON_ALREADY_ENROLLED, office.join(secret, "user/alice", worker_id="")
        )
        await office.join(secret, "user/anna", worker_id="")
        await office.refuse(REFUSED, office.join(secret, "user/arno", worker_id=""))

    in_office(tmp_path, scenario)


def test_who_joins_again_needs_a_token_that_replaces(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        first = office.caller(await office.join(await office.token("worker/alpha"), gpus=("GPU-1",)))
        taken = office.join(await office.token("worker/alpha"))
        await office.refuse(errors_pb2.ERROR_REASON_ALREADY_ENROLLED, taken)
        secret = await office.token("worker/alpha", replace=True)
        other_id = office.join(secret, worker_id="worker-other")
        await office.refuse(errors_pb2.ERROR_REASON_IDENTITY_MISMATCH, other_id)
        second = office.caller(await office.join(secret, gpus=("GPU-1",)))
        assert office.certificates.registry.is_revoked(first.serial)
        assert not office.certificates.registry.is_revoked(second.serial)

    in_office(tmp_path, scenario)


def test_a_certificate_of_a_retired_authority_does_not_prevent_a_join(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        first_secret, csr_key = await office.token("worker/alpha"), ec.generate_private_key(ec.SECP256R1())
        first = office.caller(await office.join(first_secret, csr=signing_request(csr_key), gpus=("GPU-1",)))
        office.authorities.add()
        taken = office.join(await office.token("worker/alpha"))
        await office.refuse(errors_pb2.ERROR_REASON_ALREADY_ENROLLED, taken)
        office.authorities.remove(office.authorities.members[0].serial)
        refusal = office.certificates.refusal(first)
        assert refusal is not None
        assert "is retired: ask an admin for a join token" in refusal.message

        same_key = office.join(first_secret, csr=signing_request(csr_key))
        await office.refuse(REFUSED, same_key)
        secret = await office.token("worker/alpha")
        other_id = office.join(secret, worker_id="worker-other")
        await office.refuse(errors_pb2.ERROR_REASON_IDENTITY_MISMATCH, other_id)
        second = office.caller(await office.join(secret, gpus=("GPU-1",)))
        assert office.certificates.refusal(second) is None
        assert office.certificates.registry.is_revoked(first.serial), "a backup may bring back its authority"
        taken = office.join(await office.token("worker/alpha"))
        await office.refuse(errors_pb2.ERROR_REASON_ALREADY_ENROLLED, taken)

    in_office(tmp_path, scenario)


@pytest.mark.parametrize("kind", ["user", "worker"])
def test_a_pattern_replaces_no_user_of_a_retired_authority(tmp_path: Path, kind: str) -> None:
    async def scenario(office: Office) -> None:
        name, gpus = f"{kind}/alpha", ("GPU-1",) if kind == "worker" else ()
        await office.join(await office.token(name), name, gpus=gpus)
        office.authorities.add()
        office.authorities.remove(office.authorities.members[0].serial)
        by_pattern = office.join(await office.token(f"{kind}/*", uses=2), name, gpus=gpus)
        if kind == "worker":
            await by_pattern
        else:
            await office.refuse(errors_pb2.ERROR_REASON_ALREADY_ENROLLED, by_pattern)
            await office.join(await office.token(name), name, gpus=gpus)

    in_office(tmp_path, scenario)


def test_a_worker_id_and_a_gpu_belong_to_one_name(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        await office.join(await office.token("worker/alpha"), gpus=("GPU-1",))
        secret = await office.token("worker/beta")
        copied = office.join(secret, "worker/beta", worker_id="worker-alpha")
        await office.refuse(errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID, copied)
        foreign = office.join(secret, "worker/beta", worker_id="worker-beta", gpus=("GPU-1",))
        await office.refuse(errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU, foreign)
        assert await office.tokens.unbind_gpu("GPU-1") == "worker/alpha"
        await office.join(secret, "worker/beta", worker_id="worker-beta", gpus=("GPU-1",))

    in_office(tmp_path, scenario)


def test_the_id_of_a_worker_that_never_joined_is_not_to_be_had(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        office.fleet.registry.add_stored(make_hello(), epoch=1)  # alpha, by the token of workers
        secret = await office.token("worker/beta")
        theft = office.join(secret, "worker/beta", worker_id="worker-alpha")
        await office.refuse(errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID, theft)

    in_office(tmp_path, scenario)


def test_only_a_key_on_p256_that_signed_its_request(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        secret = await office.token("worker/alpha")
        good = signing_request()
        for csr in (
            good[:-8] + bytes(8),
            good.replace(b"\x02\x01\x00", b"\x02\x01\x01", 1),  # of version 2, which nobody has defined
            b"junk",
            bytes(5000),
            signing_request(ec.generate_private_key(ec.SECP384R1())),
            signing_request(rsa.generate_private_key(65537, 2048)),
        ):
            await office.refuse(errors_pb2.ERROR_REASON_INVALID_ARGUMENT, office.join(secret, csr=csr))
        await office.join(secret, csr=good)

    in_office(tmp_path, scenario)


def test_failures_are_limited_and_others_are_not(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        secret = await office.token("worker/alpha")
        for _ in range(10):
            await office.refuse(REFUSED, office.join(b"guess"))
        limited = await office.refuse(errors_pb2.ERROR_REASON_TOO_MANY_CALLS, office.join(b"guess"))
        assert limited.retry_after_s is not None
        assert 0 < limited.retry_after_s <= 60
        await office.refuse(REFUSED, office.join(b"guess", address="ipv4:192.0.2.2"))
        await office.join(secret)  # hosts behind the same address can still join
        await office.fleet.audit.flush(is_last=True)
        refused = [one for one in await listed(office.store) if one.outcome == AUDIT_OUTCOME_REFUSED]
        assert {one.address: one.count for one in refused} == {"ipv4:192.0.2.1": 11, "ipv4:192.0.2.2": 1}

    in_office(tmp_path, scenario)


def test_refused_joins_of_one_host_do_not_hide_those_of_another(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        for host in range(2):
            for _ in range(12):
                with pytest.raises(FleetError):
                    await office.join(b"guess", f"worker/host-{host}", address=f"ipv4:192.0.2.{host}")
        await office.fleet.events.flush()
        told = [event.message for event in await all_events(office.store)]
        assert [sum(f"host-{host}" in message for message in told) for host in range(2)] == [10, 10]

    in_office(tmp_path, scenario)


def test_tokens_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_tokens, "TOKEN_LIMIT", 2)

    async def scenario(office: Office) -> None:
        for name in ("a", "b"):
            await office.token(f"worker/{name}")
        await office.refuse(errors_pb2.ERROR_REASON_TOO_MANY_JOIN_TOKENS, office.token("worker/c"))
        monkeypatch.setattr(Store, "highest_time_ns", office.store.highest_time_ns + 3601 * 10**9)
        await office.token("worker/c")

    in_office(tmp_path, scenario)


def test_a_renewal_keeps_the_name_and_betrays_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(office: Office) -> None:
        caller = office.caller(await office.join(await office.token("worker/alpha")))
        request = RenewCertificateRequest(csr=signing_request())
        early = office.enrolment.renew(request, caller)
        await office.refuse(errors_pb2.ERROR_REASON_WRONG_STATE, early)
        monkeypatch.setattr(enrolment, "RENEW_FROM", 0.0)
        renewed = (await office.enrolment.renew(request, caller)).certificate
        assert names(renewed.certificate) == ["leasehold://leasehold/worker/alpha"]
        assert renewed.ca_certificates == [b"the CA"]
        life = x509.load_der_x509_certificate(renewed.certificate)
        half = life.not_valid_before_utc + (life.not_valid_after_utc - life.not_valid_before_utc) / 2
        due = renewed.renew_time.ToDatetime(datetime.UTC)
        assert abs(due - half) < datetime.timedelta(days=1.6)
        again = await office.enrolment.renew(request, caller)
        assert again.certificate.certificate == renewed.certificate, "the answer may have been lost"
        clone = office.enrolment.renew(RenewCertificateRequest(csr=signing_request()), caller)
        await office.refuse(errors_pb2.ERROR_REASON_CERTIFICATE_CLONED, clone)
        events = [event.message for event in office.fleet.events._waiting]
        assert any("two hosts have it" in message for message in events)

    in_office(tmp_path, scenario)


def test_a_token_of_the_host_is_no_certificate(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        caller = Caller(Identity(Kind.LOCAL, "root"), "ipv4:127.0.0.1", is_local_admin=True)
        renewal = office.enrolment.renew(RenewCertificateRequest(csr=signing_request()), caller)
        await office.refuse(errors_pb2.ERROR_REASON_NOT_PERMITTED, renewal)

    in_office(tmp_path, scenario)


def test_a_blocked_name_joins_by_no_token(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        office.certificates.registry.revoke(Revocation("worker/alpha", "local/root", 1))
        blocked = office.join(await office.token("worker/alpha"))
        await office.refuse(errors_pb2.ERROR_REASON_NOT_PERMITTED, blocked)
        assert parse_identity(office.tokens.all()[0].identity).name == "alpha"
        assert office.tokens.all()[0].uses_left == 1

    in_office(tmp_path, scenario)


def test_a_revocation_ends_a_renewal_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serials: list[str] = []

    async def during(office: Office) -> None:
        first = await office.join(await office.token("worker/alpha"))
        caller = office.caller(first)
        days_ns = 15 * 86_400 * 10**9
        monkeypatch.setattr(Store, "highest_time_ns", office.store.highest_time_ns + days_ns)
        write, begun, revoked = Store.write, asyncio.Event(), asyncio.Event()

        async def slow(store: Store, *rows: Change) -> None:
            monkeypatch.setattr(Store, "write", write)
            begun.set()
            await revoked.wait()
            await write(store, *rows)

        monkeypatch.setattr(Store, "write", slow)
        requests = [RenewCertificateRequest(csr=signing_request()) for _ in range(2)]
        renewing = asyncio.ensure_future(office.enrolment.renew(requests[0], caller))
        await begun.wait()
        waiting = asyncio.ensure_future(office.enrolment.renew(requests[1], caller))
        await Revocations(office.store, office.certificates).revoke(caller.serial)
        revoked.set()
        for renewal in (renewing, waiting):
            await office.refuse(errors_pb2.ERROR_REASON_UNAUTHENTICATED, renewal)
        serials.extend(one.serial for one in office.certificates.registry.successors(caller.serial))
        assert office.certificates.registry.is_revoked(serials[0])

    async def after(office: Office) -> None:
        assert office.certificates.registry.is_revoked(serials[0])

    in_office(tmp_path, during, after)


def test_a_deletion_that_fails_halfway_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serials: list[str] = []

    async def before(office: Office) -> None:
        serials.append(office.caller(await office.join(await office.token("worker/alpha"))).serial)
        revocations = Revocations(office.store, office.certificates)
        decisions = Decisions(office.store.health, CallerBounds(CallerLimits()))
        records = RecordChanges(office.fleet, decisions, revocations)
        write = Store.write

        async def fail(store: Store, *rows: Change) -> None:
            if any(isinstance(row, Row) and row.table is schema.revocations for row in rows):
                raise FULL
            await write(store, *rows)

        request = DeleteWorkerRequest(worker="alpha")
        with monkeypatch.context() as patched:
            patched.setattr(Store, "write", fail)
            await office.refuse(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, records.delete_worker(request))
        await records.delete_worker(request)

    async def after(office: Office) -> None:
        assert office.fleet.bindings.get("alpha") is None
        assert office.certificates.registry.is_revoked(serials[0])

    in_office(tmp_path, before, after)


def test_joins_renewals_and_unbound_gpus_are_in_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "RENEW_FROM", 0.0)

    async def scenario(office: Office) -> None:
        secret = await office.token("worker/alpha")
        request = RenewCertificateRequest(csr=signing_request())
        certificate = await office.join(secret, gpus=("GPU-1",))
        caller = office.caller(certificate)
        for _ in range(2):
            await office.enrolment.renew(request, caller)
        note_caller(Caller(Identity(Kind.USER, "admin"), "ipv4:192.0.2.2"))
        note_request("/leasehold.v1.EnrolmentService/UnbindGpu", UnbindGpuRequest(gpu_uuid="GPU-1"))
        await office.tokens.unbind_gpu("GPU-1")
        joined, renewed, unbound = await listed(office.store)
        assert (joined.identity, joined.address) == ("worker/alpha", "ipv4:192.0.2.1")
        assert [entry.resource for entry in (joined, renewed, unbound)] == [
            "worker/alpha",
            "worker/alpha",
            "gpu/GPU-1",
        ]
        assert (renewed.identity, unbound.identity) == ("worker/alpha", "user/admin")
        assert json.loads(joined.arguments) == {
            "gpu_uuids": ["GPU-1"],
            "identity": "worker/alpha",
            "worker_id": "worker-alpha",
        }
        assert json.loads(renewed.arguments) == {}

    in_office(tmp_path, scenario)


def test_no_token_for_whom_no_listener_asks_for_a_certificate(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        office.tokens.kinds = frozenset({Kind.USER, Kind.SERVICE})
        refused = office.token("worker/alpha")
        error = await office.refuse(errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY, refused)
        assert "--worker-listen on an address off loopback" in error.message
        await office.token("user/alice")

    in_office(tmp_path, scenario)


def test_any_request_is_answered_or_refused(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        secret = await office.token("worker/a*", uses=256)
        joined = 0
        for seed in range(400):
            choose = random.Random(seed)
            request = fill(JoinRequest, choose)
            if choose.random() < 0.8:
                request.secret = secret
            if choose.random() < 0.8:
                request.identity = f"worker/a{seed}"
            if choose.random() < 0.8:
                request.csr = CSR
            with suppress(FleetError):  # and nothing else
                await office.enrolment.join(request, f"ipv4:192.0.2.{seed}")
                joined += 1
        assert joined < 400

    in_office(tmp_path, scenario)
