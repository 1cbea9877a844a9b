"""Secret variables of workloads: encrypted from their arrival on, and in clear only for a start.

The values in specs, and so in the journal, are sealed by AES-256-GCM. The associated data are the workload's
id and the variable's name. Reports have empty values.
"""

import base64
import os
from typing import Final, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.worker.v1.session_pb2 import CommandSpec

NONCE_BYTES: Final = 12
"""Bytes of a random nonce (NIST SP 800-38D). Each value gets one."""


class SealError(Exception):
    """A value can't be decrypted; the text names the variable."""


@final
class SecretVariables:
    """Seals and reveals the secret variables of one worker's workloads.

    Args:
        key: The key, of 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, command: CommandSpec) -> None:
        """Encrypts the secret variables of a run in place."""
        if not command.operation.HasField("run"):
            return
        variables = command.operation.run.spec.secret_environment
        for name, value in list(variables.items()):  # a map must not change during its iteration
            nonce = os.urandom(NONCE_BYTES)
            bound = _bound(command.workload_id, name)
            sealed = nonce + self._cipher.encrypt(nonce, value.encode(), bound)
            variables[name] = base64.b64encode(sealed).decode()

    def reveal(self, workload_id: str, spec: WorkloadSpec) -> dict[str, str]:
        """The secret variables of a workload in clear.

        Raises:
            SealError: A value was sealed with another key, or for another workload or variable.
        """
        return {
            name: self._open(workload_id, name, sealed) for name, sealed in spec.secret_environment.items()
        }

    def _open(self, workload_id: str, name: str, sealed: str) -> str:
        try:
            data = base64.b64decode(sealed, validate=True)
            bound = _bound(workload_id, name)
            return self._cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], bound).decode()
        except (InvalidTag, ValueError) as error:
            raise SealError(
                f"its secret variable {name} can't be decrypted, since the worker's key is another one or "
                "the value was erased"
            ) from error


def _bound(workload_id: str, name: str) -> bytes:
    """The associated data of a value. No id and no name has a NUL byte."""
    return f"{workload_id}\0{name}".encode()
