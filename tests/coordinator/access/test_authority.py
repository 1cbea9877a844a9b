"""The certificate authority: what its certificates say."""

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store
from leasehold_coordinator.access.authority import Authority, IssueRules, open_authority
from leasehold_coordinator.access.identities import Identity, Kind

RULES = IssueRules(trust_domain="example.org", client_life=datetime.timedelta(days=2))
WORKER = Identity(Kind.WORKER, "gpu-07")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return open_authority(tmp_path, RULES)


def test_a_clients_certificate_has_one_identity_and_is_for_clients_only(authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    before = datetime.datetime.now(datetime.UTC)
    issued = authority.issue_client(key.public_key(), WORKER, "0123")
    certificate = x509.load_der_x509_certificate(issued.der)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier("leasehold://example.org/worker/gpu-07")]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert certificate.public_key() == key.public_key()
    assert (issued.identity, issued.predecessor, issued.authority) == (WORKER, "0123", authority.serial)
    assert issued.serial == f"{certificate.serial_number:x}"
    assert issued.fingerprint == certificate.fingerprint(hashes.SHA256())
    times = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    assert times == (issued.not_before, issued.not_after)
    minute = datetime.timedelta(minutes=1)
    assert abs(issued.not_before - before + datetime.timedelta(minutes=5)) < minute
    assert abs(issued.not_after - before - RULES.client_life) < minute
    verifier = PolicyBuilder().store(Store([authority.certificate])).build_client_verifier()
    assert verifier.verify(certificate, []).subjects == list(names)


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    short = IssueRules(authority_life=datetime.timedelta(days=1))
    authority = open_authority(tmp_path, short)
    key = ec.generate_private_key(ec.SECP256R1())
    end = authority.certificate.not_valid_after_utc
    assert authority.issue_client(key.public_key(), WORKER).not_after == end
    server = authority.issue_server(["localhost"])
    assert x509.load_pem_x509_certificate(server.chain).not_valid_after_utc == end
    assert server.renew_time < end
