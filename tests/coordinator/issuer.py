"""An OpenID Connect issuer of a test: real keys, and an HTTP server with the public ones."""

import base64
import datetime
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER: Final = "https://login.example"
AUDIENCE: Final = "leasehold"
PrivateKey: TypeAlias = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@cache
def rsa_key(number: int = 0, bits: int = 2048) -> rsa.RSAPrivateKey:
    """An RSA key. It takes a while to make one."""
    return rsa.generate_private_key(65_537, bits)


def new_keys() -> dict[str, tuple[str, PrivateKey]]:
    """A key for each algorithm, by key ids."""
    return {
        "rs": ("RS256", rsa_key(0)),
        "ps": ("PS256", rsa_key(1)),
        "es": ("ES256", ec.generate_private_key(ec.SECP256R1())),
        "ed": ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
    }


def public_jwk(key: PrivateKey, **more: object) -> dict[str, object]:
    """The public part of a key, as an entry of a key set."""
    match key:
        case rsa.RSAPrivateKey():
            entry = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        case ec.EllipticCurvePrivateKey():
            entry = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
        case _:
            entry = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    entry.pop("key_ops", None)
    return {**entry, **more}


def key_set(keys: dict[str, tuple[str, PrivateKey]]) -> bytes:
    """The document with the public keys."""
    entries = [public_jwk(key, kid=name, alg=algorithm) for name, (algorithm, key) in keys.items()]
    return json.dumps({"keys": entries}).encode()


def claims(**changed: object) -> dict[str, Any]:
    """The claims of a good token. A claim that is None is left out, and a duration is from now."""
    now = int(time.time())
    changed = {
        name: now + int(value.total_seconds()) if isinstance(value, datetime.timedelta) else value
        for name, value in changed.items()
    }
    good = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now, "nbf": now, "exp": now + 600}
    return {name: value for name, value in (good | changed).items() if value is not None}


def sign(key: PrivateKey, algorithm: str, key_id: str | None, **changed: object) -> str:
    """A token."""
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.PyJWS().encode(json.dumps(claims(**changed)).encode(), key, algorithm, headers)


def by_hand(header: dict[str, object], payload: dict[str, object], signature: bytes = b"") -> str:
    """A token that no library would make."""
    parts = [json.dumps(part).encode() for part in (header, payload)]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, signature))


class KeyServer:
    """Serves a key set over HTTP on loopback.

    Attributes:
        document: The content.
        status: The status of its answers.
        fetches: How often it was asked.
    """

    def __init__(self, document: bytes) -> None:
        self.document = document
        self.status = 200
        self.fetches = 0
        self.url = ""


@contextmanager
def serving_keys(document: bytes) -> Iterator[KeyServer]:
    """A server of keys for the time of the context."""
    found = KeyServer(document)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.fetches += 1
            self.send_response(found.status)
            if found.status == 302:
                self.send_header("Location", f"{found.url}/elsewhere")
            self.send_header("Content-Length", str(len(found.document)))
            self.end_headers()
            self.wfile.write(found.document)

        def log_message(self, *_: object) -> None:  # nothing to standard error
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_address[1]}/keys"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
