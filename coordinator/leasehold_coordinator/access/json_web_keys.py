"""The public keys of an OpenID Connect issuer (JSON Web Key Set, RFC 7517), each bound to one algorithm."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt import PyJWK, PyJWTError

PublicKey: TypeAlias = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey

KEYS_LIMIT: Final = 100
RSA_BITS: Final = range(2_048, 8_193)
"""Sizes of RSA keys. A larger key would take the event loop too long."""

_ALGORITHMS: Final = {"RSA": ("RS256", "PS256"), "EC": ("ES256",), "OKP": ("EdDSA",)}
"""Permitted algorithms by type of key. The first one holds for keys that name none."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key of the issuer.

    Attributes:
        algorithm: The only algorithm that the key may verify.
        key: The public key.
    """

    algorithm: str
    key: PublicKey


def parse_keys(data: bytes) -> dict[str, SigningKey]:
    """Reads a key set. Keys for other uses or of other algorithms are left out.

    Returns:
        The keys by their ids. A key without an id has the empty one.

    Raises:
        ValueError: The data is no key set, or has no usable key. The message says why.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("it has no list of keys")
    if len(entries) > KEYS_LIMIT:
        raise ValueError(f"it has {len(entries)} keys, of at most {KEYS_LIMIT}")
    keys: dict[str, SigningKey] = {}
    for entry in entries:
        algorithm = _algorithm(entry)
        if algorithm is None:
            continue
        key_id = entry.get("kid", "")
        if not isinstance(key_id, str) or key_id in keys:
            raise ValueError(f"the key id {str(key_id)[:100]!r} is no text, or two keys have it")
        keys[key_id] = SigningKey(algorithm, _public_key(entry, algorithm))
    if not keys:
        raise ValueError("it has no key for signatures with RS256, PS256, ES256 or EdDSA")
    return keys


def _algorithm(entry: Mapping[str, object]) -> str | None:
    """The algorithm of a key. None: the key has another use, or no permitted algorithm."""
    if entry.get("use", "sig") != "sig":
        return None
    permitted = _ALGORITHMS.get(str(entry.get("kty")), ())
    if not permitted:
        return None
    algorithm = entry.get("alg", permitted[0])
    return str(algorithm) if algorithm in permitted else None


def _public_key(entry: dict[str, object], algorithm: str) -> PublicKey:
    name = str(entry.get("kid", ""))[:100]
    if "d" in entry:
        raise ValueError(f"the key {name!r} is a private key: publish the public part only")
    try:
        key: object = PyJWK(entry, algorithm).key
    except (PyJWTError, ValueError, TypeError) as error:
        raise ValueError(f"the key {name!r} is malformed ({error})") from None
    if isinstance(key, rsa.RSAPublicKey) and key.key_size in RSA_BITS:
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    raise ValueError(
        f"the key {name!r} is not permitted: use RSA with {RSA_BITS[0]} to {RSA_BITS[-1]} bits, P-256 or "
        "Ed25519"
    )
