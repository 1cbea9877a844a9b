"""Bearer tokens of hooks for servers, read right before each call.

The workload's spec has only the place of a token. The token itself is in no journal, log, error or warning:
:class:`leasehold_worker.hooks.http_call.HttpAnswer` hides it if a server repeats it.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio
from leasehold.v1 import hook_pb2

from leasehold_worker.hooks.context import HookFailedError
from leasehold_worker.host.accounts import Account
from leasehold_worker.programs.user_files import UserFileError, read_as

TOKEN_LIMIT: Final = 4096
"""Characters of a token."""

READ_TIMEOUT_S: Final = 5.0
"""Timeout of reading a file: a network volume can hang."""

_readers: Final = trio.CapacityLimiter(8)
"""Threads that read files, including those that hang."""

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


async def read_token(
    credential: hook_pb2.HookCredential, environment: Mapping[str, str], account: Account | None = None
) -> str | None:
    """The token of a request. None: it has none.

    Args:
        credential: Place of the token. An empty one means none.
        environment: Environment with the variables.
        account: The workload's Unix user, whose rights decide about a file. None: the worker's own.

    Raises:
        HookFailedError: The token is missing or invalid; the text does not contain it.
    """
    match credential.WhichOneof("source"):
        case "file":
            where = f"the credential in {credential.file}"
            token = await _from_file(credential.file, account)
        case "environment_variable":
            where = f"the credential in the variable {credential.environment_variable}"
            token = environment.get(credential.environment_variable, "")
        case _:
            return None
    if not token or len(token) > TOKEN_LIMIT or not _TOKEN.fullmatch(token):
        why = "is empty" if not token else f"has spaces, control characters, or over {TOKEN_LIMIT} characters"
        raise HookFailedError(f"{where} {why}: it must hold one token and nothing else")
    return token


async def _from_file(path: str, account: Account | None) -> str:
    try:
        if account is not None:
            content = await read_as(account, path, TOKEN_LIMIT + 2, READ_TIMEOUT_S)
            return content.decode(errors="replace").strip()
        with trio.fail_after(READ_TIMEOUT_S):
            return await trio.to_thread.run_sync(_read, Path(path), abandon_on_cancel=True, limiter=_readers)
    except (OSError, ValueError, UserFileError, trio.TooSlowError) as error:
        why = str(error) or f"not read within {READ_TIMEOUT_S:g} s"
        raise HookFailedError(
            f"the credential in {path} can't be read ({why}): correct the file or its rights, then try again"
        ) from None


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return os.read(descriptor, TOKEN_LIMIT + 2).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
