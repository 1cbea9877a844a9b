"""Keys of an issuer: each has one algorithm, and odd ones are refused or left out."""

import contextlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import example, given
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm
from leasehold_coordinator.access.json_web_keys import KEYS_LIMIT, parse_keys

from tests.coordinator.issuer import key_set, new_keys, public_jwk, rsa_key
from tests.examples import PATIENT

EC = public_jwk(ec.generate_private_key(ec.SECP256R1()), kid="a")


def document(*entries: object) -> bytes:
    return json.dumps({"keys": entries}).encode()


def test_each_key_has_one_algorithm() -> None:
    keys = parse_keys(key_set(new_keys()))
    found = {name: key.algorithm for name, key in keys.items()}
    assert found == {"rs": "RS256", "ps": "PS256", "es": "ES256", "ed": "EdDSA"}


def test_a_key_that_names_no_algorithm_has_the_usual_one() -> None:
    keys = parse_keys(document(public_jwk(rsa_key(), kid="rsa"), EC))
    assert [key.algorithm for key in keys.values()] == ["RS256", "ES256"]


def test_keys_for_other_uses_and_algorithms_are_left_out() -> None:
    others: list[dict[str, object]] = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"},
        public_jwk(rsa_key(), kid="b", use="enc"),
        public_jwk(rsa_key(), kid="c", alg="RS512"),
        {**EC, "kid": "d", "alg": "RS256"},
        {"kty": "new", "kid": "e"},
    ]
    assert list(parse_keys(document(EC, *others))) == ["a"]
    with pytest.raises(ValueError, match="no key for signatures"):
        parse_keys(document(*others))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no list of keys"),
        (b'{"keys": 1}', "no list of keys"),
        (b'{"keys": [1]}', "no list of keys"),
        (document(EC, EC), "two keys have it"),
        (document({**EC, "kid": 1}), "is no text"),
        (document({**EC, "x": "!"}), "malformed"),
        (document({**EC, "x": 7}), "malformed"),
        (document({"kty": "RSA", "kid": "a"}), "malformed"),
        (document(*[{**EC, "kid": str(n)} for n in range(KEYS_LIMIT + 1)]), "101 keys, of at most 100"),
        (
            document(public_jwk(ec.generate_private_key(ec.SECP384R1()), kid="a", alg="ES256")),
            "malformed|not permitted",
        ),
        (document(public_jwk(rsa_key(0, 1024), kid="a")), "not permitted: use RSA with 2048 to 8192"),
        (
            document({**json.loads(RSAAlgorithm.to_jwk(rsa_key())), "key_ops": None, "kid": "a"}),
            "private key",
        ),
    ],
)
def test_odd_sets_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_keys(data)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())
FIELDS = {
    "kty": st.sampled_from(["RSA", "EC", "OKP", "oct"]) | VALUES,
    "crv": st.sampled_from(["P-256", "P-384", "secp256k1", "Ed25519", "X25519", "Ed448"]) | VALUES,
    "alg": st.sampled_from(["RS256", "PS256", "ES256", "EdDSA", "none"]) | VALUES,
    "use": st.sampled_from(["sig", "enc"]) | VALUES,
    "kid": VALUES,
}
NUMBERS = st.sampled_from(["", "AQAB", "AA", "A" * 43, "_" * 43, "A" * 342, "_" * 342]) | VALUES


@PATIENT
@given(st.fixed_dictionaries({}, optional={**FIELDS, **dict.fromkeys(("n", "e", "x", "y", "d"), NUMBERS)}))
@example({"kty": "RSA", "n": "", "e": ""})
@example({"kty": "OKP", "crv": "X25519", "x": "A" * 43})
def test_any_other_set_is_refused_by_a_value_error(entry: dict[str, object]) -> None:
    with contextlib.suppress(ValueError):
        parse_keys(document(entry))
