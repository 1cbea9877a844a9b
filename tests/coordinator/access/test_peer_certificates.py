"""Which client certificates have the right form."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.peer_certificates import parse_peer_certificate

KEY = ec.generate_private_key(ec.SECP256R1())
ALICE = "leasehold://leasehold/user/alice"
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def certificate(*uris: str, usages: tuple[x509.ObjectIdentifier, ...] = (CLIENT,)) -> bytes:
    """A certificate as a PKI of others may issue it."""
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "root")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(KEY.public_key())
        .serial_number(0xAB)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    names = [x509.DNSName("host.example"), *map(x509.UniformResourceIdentifier, uris)]
    if uris:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_one_uri_of_the_trust_domain_is_the_identity() -> None:
    found = parse_peer_certificate(certificate(ALICE, usages=(CLIENT, SERVER)), "leasehold")
    assert (found.identity, found.serial) == (Identity(Kind.USER, "alice"), "ab")


@pytest.mark.parametrize(
    ("pem", "why"),
    [
        (certificate(), "has 0 URIs in its subjectAltName: expected one, such as leasehold://leasehold/user"),
        (certificate(ALICE, "leasehold://leasehold/user/bob"), "has 2 URIs"),
        (certificate("leasehold://other/user/alice"), "expected leasehold://leasehold/worker/NAME"),
        (certificate("leasehold://leasehold/local/root"), "no certificate carries"),
        (certificate(ALICE, usages=()), "user/alice lacks the extended key usage clientAuth"),
        (certificate(ALICE, usages=(SERVER,)), "lacks the extended key usage clientAuth"),
    ],
)
def test_others_are_refused_with_the_expected_form(pem: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_peer_certificate(pem, "leasehold")
