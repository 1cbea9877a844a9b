"""Encryption of secret environment variables at rest, and digests of requests that may contain them.

The keys are in ``keys/`` of the state directory, apart from the store. So a copy of the store alone reveals
no value, and no digest in it can be compared with a guess.
"""

import base64
import os
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Final, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from leasehold_coordinator.access.private_files import create_file, open_directory, read_file
from leasehold_coordinator.errors import StartError

DIRECTORY: Final = "keys"
ENVIRONMENT_FILE: Final = "environment.key"
REQUESTS_FILE: Final = "requests.key"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
"""Bytes of a random nonce (NIST SP 800-38D). Each value gets one."""

DIGEST_BYTES: Final = 16


class SealError(Exception):
    """A sealed value can't be decrypted: another key, another workload, another name, or damage."""


@final
class SecretVault:
    """Seals and reveals values of variables.

    Args:
        environment_key: The key of AES-256-GCM.
        requests_key: The key of the digests.
    """

    def __init__(self, environment_key: bytes, requests_key: bytes) -> None:
        self._cipher = AESGCM(environment_key)
        self._requests_key = requests_key

    def seal(self, workload_id: str, name: str, value: str) -> str:
        """Encrypts the value of a workload's variable, as text for a message."""
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, value.encode(), _bound(workload_id, name))
        return base64.b64encode(sealed).decode()

    def reveal(self, workload_id: str, name: str, sealed: str) -> str:
        """Decrypts a value.

        Raises:
            SealError: The value was not sealed for this variable of this workload with the present key.
        """
        try:
            data = base64.b64decode(sealed, validate=True)
            return self._cipher.decrypt(
                data[:NONCE_BYTES], data[NONCE_BYTES:], _bound(workload_id, name)
            ).decode()
        except (InvalidTag, ValueError) as error:
            raise SealError(f"the secret variable {name} of {workload_id} can't be decrypted") from error

    def digest(self, content: bytes) -> bytes:
        """The keyed digest of a request."""
        return blake2b(content, digest_size=DIGEST_BYTES, key=self._requests_key).digest()


def open_vault(state_directory: Path) -> SecretVault:
    """The vault with the keys in a state directory, which are created if they are missing.

    Raises:
        StartError: A key is damaged or can't be read, or another user could read or replace it.
    """
    directory = state_directory / DIRECTORY
    try:
        open_directory(directory)
        return SecretVault(_key(directory / ENVIRONMENT_FILE), _key(directory / REQUESTS_FILE))
    except OSError as error:
        raise StartError(
            f"{error.filename or directory} can't be created or read: {error.strerror}; repair that, or "
            "choose another directory with --state-dir"
        ) from error


def _key(path: Path) -> bytes:
    if not path.exists():
        create_file(path, secrets.token_bytes(KEY_BYTES))
    key = read_file(path, is_secret=True)
    if len(key) != KEY_BYTES:
        raise StartError(
            f"{path} has {len(key)} bytes, and a key has {KEY_BYTES}: restore the key from a backup, or "
            "delete it, which loses the secret variables of commands that have not ended"
        )
    return key


def _bound(workload_id: str, name: str) -> bytes:
    """The associated data of a value: what it belongs to. No id and no name has a NUL byte."""
    return f"{workload_id}\0{name}".encode()
