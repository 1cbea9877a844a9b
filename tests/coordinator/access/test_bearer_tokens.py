"""Tokens of an issuer: who they name, and that a forged, foreign or stale one names nobody."""

import contextlib
import datetime
import re
import time

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st
from leasehold_coordinator.access.bearer_tokens import (
    TOKEN_LIMIT_BYTES,
    OidcSettings,
    TokenError,
    UnknownKeyError,
    verify,
)
from leasehold_coordinator.access.json_web_keys import parse_keys
from leasehold_coordinator.access.roles import Role

from tests.coordinator.issuer import AUDIENCE, ISSUER, by_hand, claims, key_set, new_keys, rsa_key, sign
from tests.examples import PATIENT

KEYS = new_keys()
KNOWN = parse_keys(key_set(KEYS))
SETTINGS = OidcSettings(
    ISSUER, AUDIENCE, role_claim="groups", roles={"gpu-admins": "admin", "everybody": "viewer"}
)
S = datetime.timedelta(seconds=1)
"""Times of claims are written from the present, when the token is signed."""


def refusal(token: str) -> str:
    """Why a token is refused."""
    with pytest.raises(TokenError) as error:
        verify(token, KNOWN, SETTINGS)
    assert token[:40] not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("key_id", KEYS)
def test_a_good_token_of_each_algorithm(key_id: str) -> None:
    algorithm, key = KEYS[key_id]
    expiry = int(time.time()) + 100
    user = verify(sign(key, algorithm, key_id, exp=expiry), KNOWN, SETTINGS)
    assert (str(user.identity), user.role) == ("user/oidc-alice", Role.NONE)
    assert user.expire_time == datetime.datetime.fromtimestamp(expiry + 60, datetime.UTC)


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        ([], Role.NONE),
        ("everybody", Role.VIEWER),
        (["everybody", "gpu-admins"], Role.ADMIN),
        (["admin", 7, None, {}], Role.NONE),
    ],
)
def test_roles_are_those_that_the_settings_map(groups: object, role: Role) -> None:
    assert verify(sign(KEYS["es"][1], "ES256", "es", groups=groups), KNOWN, SETTINGS).role is role


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"iss": "https://evil.example"}, "issuer"),
        ({"iss": None}, "iss"),
        ({"aud": "another"}, "[Aa]udience"),
        ({"aud": None}, "aud"),
        ({"exp": -61 * S}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "integer"),
        ({"exp": float("inf")}, "."),
        ({"iat": 120 * S}, "yet valid"),
        ({"iat": None}, "iat"),
        ({"nbf": 120 * S}, "yet valid"),
        ({"sub": None}, "is no name of a user"),
        ({"sub": 7}, "."),
        ({"sub": "../root"}, "is no name of a user"),
        ({"sub": "a b"}, "is no name of a user"),
        ({"sub": "alice\n"}, "is no name of a user"),
        ({"sub": "x" * 60}, "is no name of a user"),
        ({"groups": 7}, "neither a text nor a list"),
    ],
)
def test_claims_that_do_not_fit(changed: dict[str, object], match: str) -> None:
    token = sign(KEYS["es"][1], "ES256", "es", **changed)
    with pytest.raises(TokenError, match=match):
        verify(token, KNOWN, SETTINGS)


def test_an_email_address_that_the_issuer_has_not_verified() -> None:
    settings = OidcSettings(ISSUER, AUDIENCE, name_claim="email", prefix="")
    for verified in (False, "false", None, 1):
        token = sign(KEYS["es"][1], "ES256", "es", email="boss@example.com", email_verified=verified)
        if verified is None:  # the issuer does not tell: it has no others
            assert str(verify(token, KNOWN, settings).identity) == "user/boss@example.com"
            continue
        with pytest.raises(TokenError, match="has not verified"):
            verify(token, KNOWN, settings)
    token = sign(KEYS["es"][1], "ES256", "es", email="boss@example.com", email_verified=True)
    assert verify(token, KNOWN, settings)


def test_clocks_may_differ_by_a_minute() -> None:
    for changed in ({"exp": -30 * S}, {"iat": 30 * S}, {"nbf": 30 * S}, {"aud": ["other", AUDIENCE]}):
        verify(sign(KEYS["es"][1], "ES256", "es", **changed), KNOWN, SETTINGS)


def test_an_unsigned_token() -> None:
    for name in ("none", "None", "", None, 1):
        refusal(by_hand({"alg": name, "kid": "rs"}, claims()))
    refusal(jwt.encode(claims(), "", "none", {"kid": "rs"}))


def test_the_public_key_as_a_secret() -> None:
    """The classic confusion: HS256 with the bytes of the public RSA key."""
    key = KEYS["rs"][1]
    assert isinstance(key, rsa.RSAPrivateKey)
    for form in (serialization.PublicFormat.SubjectPublicKeyInfo, serialization.PublicFormat.PKCS1):
        public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
        signing_input, _, _ = by_hand({"alg": "HS256", "kid": "rs"}, claims()).rpartition(".")
        algorithm = jwt.get_algorithm_by_name("HS256")
        signature = algorithm.sign(signing_input.encode(), public)
        token = f"{signing_input}.{jwt.utils.base64url_encode(signature).decode()}"
        assert "its key is for RS256 only" in refusal(token)


def test_a_key_serves_its_algorithm_only() -> None:
    assert "its key is for RS256 only" in refusal(sign(KEYS["rs"][1], "PS256", "rs"))
    assert "its key is for PS256 only" in refusal(sign(KEYS["ps"][1], "RS256", "ps"))


def test_another_key_under_a_known_id() -> None:
    assert "ignature" in refusal(sign(rsa_key(2), "RS256", "rs"))
    assert "ignature" in refusal(sign(KEYS["ps"][1], "RS256", "rs"))
    assert "its key is for ES256 only" in refusal(sign(KEYS["rs"][1], "RS256", "es"))


@pytest.mark.parametrize("key_id", [None, "other", "../rs", "rs\x00"])
def test_an_unknown_key(key_id: str | None) -> None:
    with pytest.raises(UnknownKeyError):
        verify(sign(KEYS["rs"][1], "RS256", key_id), KNOWN, SETTINGS)


def test_a_key_in_the_header_is_not_used() -> None:
    own = rsa_key(2)
    header = {"kid": "rs", "jku": "http://127.0.0.1:1/", "jwk": {"kty": "RSA", "n": "AQAB", "e": "AQAB"}}
    assert "ignature" in refusal(jwt.encode(claims(), own, "RS256", header))


def test_critical_extensions() -> None:
    for value in (["b64"], [], "b64", None):
        token = by_hand({"alg": "ES256", "kid": "es", "crit": value}, claims())
        assert re.search("[Cc]rit", refusal(token))


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "..",
        "a.b.c",
        "a" * 4000,
        "é.é.é",
        "x" * (TOKEN_LIMIT_BYTES + 1),
        "e30.e30.",
        "e30.e30.e30.e30.e30",
    ],
)
def test_no_token_at_all(token: str) -> None:
    with pytest.raises(TokenError):
        verify(token, KNOWN, SETTINGS)


@pytest.mark.parametrize("token", ["a" * 40, "a.b.c", "é"])
def test_a_mangled_token_of_either_kind_is_told_as_such(token: str) -> None:
    assert "neither a JSON Web Token nor the whole text of client.token" in refusal(token)


def test_deep_and_changed_content() -> None:
    header, payload, signature = sign(KEYS["es"][1], "ES256", "es").split(".")
    deep = jwt.utils.base64url_encode(b"[" * 3_000).decode()
    other = sign(KEYS["es"][1], "ES256", "es", sub="root").split(".")[1]
    for token in (
        f"{deep}.{payload}.{signature}",
        f"{header}.{deep}.{signature}",
        f"{header}.{other}.{signature}",
        f"{header}.{payload}.",
        f"{header}.{payload}.{signature[:-4]}",
    ):
        with pytest.raises(TokenError):
            verify(token, KNOWN, SETTINGS)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())
NAMES = ("alg", "kid", "typ", "cty", "crit", "b64", "iss", "aud", "exp", "iat", "nbf", "sub", "groups")
MAPPINGS = st.dictionaries(st.sampled_from(NAMES), VALUES)


@PATIENT
@given(MAPPINGS, st.sampled_from(["rs", "ps", "es", "ed"]), MAPPINGS)
def test_any_other_token_is_refused(
    header: dict[str, object], key_id: str, changed: dict[str, object]
) -> None:
    with contextlib.suppress(TokenError):
        verify(by_hand({"kid": key_id, "alg": KEYS[key_id][0], **header}, claims(**changed)), KNOWN, SETTINGS)
        pytest.fail("an unsigned token was accepted")


@PATIENT
@given(MAPPINGS)
def test_signed_nonsense_is_a_user_or_refused(changed: dict[str, object]) -> None:
    with contextlib.suppress(TokenError):
        verify(sign(KEYS["es"][1], "ES256", "es", **changed), KNOWN, SETTINGS)
