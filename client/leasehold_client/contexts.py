"""Contexts: coordinators with this user's client certificates, in one private file.

The file is replaced as a whole, so a reader needs no lock. Writers hold a lock, also while they renew a
certificate: two renewals of one certificate with two keys would look like a theft.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import BinaryIO, Final

from leasehold_client.config import (
    COORDINATOR_VARIABLE,
    INSECURE_SCHEME,
    UNIX_SCHEME,
    config_path,
    configured_coordinator,
    parse_address,
)
from leasehold_client.errors import UsageError
from leasehold_client.private_files import replace_file

CONTEXT_VARIABLE: Final = "LEASEHOLD_CONTEXT"
"""Environment variable with the name of the context."""

FILE: Final = "contexts.json"
LOCK_FILE: Final = "contexts.lock"
LOCK_TIMEOUT_S: Final = 20.0
"""How long the lock is waited for. A renewal, which calls the coordinator, holds it for 10 s at most."""

LOCK_INTERVAL_S: Final = 0.05
MODE: Final = 0o600
SIZE_LIMIT_BYTES: Final = 4_000_000
CONTEXT_LIMIT: Final = 100
"""Most contexts."""


@dataclass(frozen=True, slots=True)
class Context:
    """A coordinator with a client certificate.

    Keys and certificates are PEM. Times are seconds of the Unix epoch.

    Attributes:
        name: The name of the context.
        identity: The identity of the certificate, such as ``user/alice``.
        coordinator: HOST:PORT of the coordinator. Empty: the login is not complete.
        key: The private key.
        certificate: The client certificate.
        authorities: The certificates by which the coordinator is verified.
        begin_s: When the certificate becomes valid.
        expire_s: When the certificate expires.
        renew_s: When the certificate is due to be renewed.
        next_key: The key of a login or a renewal whose answer is not here yet.
        next_ticket: SHA-256 of the join token for ``next_key``, in hexadecimal. Empty: it is for a renewal.
        ticket_digest: SHA-256 of the join token of the last login, in hexadecimal.
    """

    name: str
    identity: str
    coordinator: str = ""
    key: str = ""
    certificate: str = ""
    authorities: str = ""
    begin_s: float = 0.0
    expire_s: float = 0.0
    renew_s: float = 0.0
    next_key: str = ""
    next_ticket: str = ""
    ticket_digest: str = ""

    def require_valid(self) -> None:
        """Refuses a certificate that the coordinator would refuse.

        Raises:
            UsageError: The certificate has expired or is not valid yet, or the login is not complete.
        """
        kind, _, name = self.identity.partition("/")
        token = f"`leasehold token create --{kind} {name} --replace`"
        if not self.certificate:
            raise UsageError(
                f"the login of context {self.name} is not complete: repeat `leasehold login` with its token"
            )
        if (late_s := time.time() - self.expire_s) > 0:
            raise UsageError(
                f"the certificate of {self.identity} in context {self.name} expired {span_text(late_s)} ago, "
                f"by this host's clock: ask an admin for {token}, then `leasehold login --token - --context "
                f"{self.name}`. On the coordinator's host, `leasehold context use -` comes first"
            )
        if (early_s := self.begin_s - time.time()) > 0:
            raise UsageError(
                f"the certificate of {self.identity} in context {self.name} is valid in {span_text(early_s)} "
                "only, by this host's clock: the clock is behind; set it"
            )


@dataclass(frozen=True, slots=True)
class Contexts:
    """The content of the file.

    Attributes:
        current: The name of the current context. Empty: none.
        by_name: The contexts.
    """

    current: str = ""
    by_name: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """The context with a name.

        Raises:
            UsageError: There is none.
        """
        if name not in self.by_name:
            known = f"the contexts are {', '.join(self.by_name)}" if self.by_name else "there is no context"
            raise UsageError(f"no context is named {name!r}: {known}; `leasehold login` makes one")
        return self.by_name[name]

    def name_for(self, address: str) -> str | None:
        """The name of a context with a coordinator, the current one first. None: there is none."""
        names = [one.name for one in self.by_name.values() if one.coordinator == address]
        return self.current if self.current in names else next(iter(names), None)

    def put(self, context: Context) -> Contexts:
        """The contexts with one added or replaced.

        Raises:
            UsageError: There are too many.
        """
        if context.name not in self.by_name and len(self.by_name) >= CONTEXT_LIMIT:
            raise UsageError(
                f"{CONTEXT_LIMIT} contexts exist, which is the limit: `leasehold context delete` some"
            )
        return replace(self, by_name={**self.by_name, context.name: context})


def span_text(span_s: float) -> str:
    """A span of time in its largest unit, such as ``3 days``."""
    for unit_s, unit in ((86_400.0, "day"), (3_600.0, "hour"), (60.0, "minute")):
        if span_s >= unit_s:
            count = int(span_s // unit_s)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{span_s:.0f} s"


def read_contexts() -> Contexts:
    """The contexts of this user.

    Raises:
        UsageError: The file is damaged, unreadable, or others could have read it.
    """
    try:
        path = config_path().with_name(FILE)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise UsageError(
            f"the contexts in {path} can't be read: {error.strerror}; make it a file of yours"
        ) from error
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is a directory, and contexts are a file: move it away, and log in again")
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UsageError(
                f"{path} has private keys and is not a file of yours with mode 0600: others may have the "
                "keys; delete it, and log in again"
            )
        data = file.read(SIZE_LIMIT_BYTES)
    try:
        return _parse(json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}): delete it, and log in again") from error


def _parse(document: object) -> Contexts:
    """The contexts in a JSON document.

    Raises:
        ValueError: A part is missing or has another type.
    """
    if not isinstance(document, dict) or set(document) != {"current", "contexts"}:
        raise ValueError("it needs current and contexts")
    current, contexts = document["current"], document["contexts"]
    if not isinstance(current, str) or not isinstance(contexts, dict):
        raise ValueError("current is no text, or contexts no object")  # noqa: TRY004 - as for any other damage
    return Contexts(current, {name: _context(name, values) for name, values in contexts.items()})


def _context(name: str, values: object) -> Context:
    if not isinstance(values, dict):
        raise ValueError(f"{name!r} is no object")  # noqa: TRY004 - as for any other damage
    kinds = {one.name: float if one.name.endswith("_s") else str for one in fields(Context)}
    del kinds["name"]
    for key, value in values.items():
        if key not in kinds or not isinstance(value, str if kinds[key] is str else (int, float)):
            raise ValueError(f"{key!r} of {name!r} is unknown, or has another type")
    return Context(name=name, **values)


@contextmanager
def locked_contexts() -> Iterator[Callable[[Contexts], None]]:
    """Locks the contexts, and gives a function that replaces them.

    Raises:
        UsageError: The file can't be written.
    """
    try:
        folder = config_path().parent
    except FileNotFoundError as error:
        raise UsageError(f"contexts can't be stored: {error.strerror}") from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(folder / LOCK_FILE, flags, MODE), "wb") as lock:
            _take(lock, folder / LOCK_FILE)
            yield lambda contexts: _write(folder / FILE, contexts)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if is_full else "make it a directory of yours"
        raise UsageError(f"the contexts in {folder} can't be written: {error.strerror}; {remedy}") from error


def _take(lock: BinaryIO, path: Path) -> None:
    """Takes the lock.

    Raises:
        UsageError: Another program holds it for longer than a renewal takes, such as a stopped one.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"another program has held {path} for {LOCK_TIMEOUT_S:g} s: continue or end it "
                    "(`fuser` names it), and try again"
                ) from None
        time.sleep(LOCK_INTERVAL_S)


def _write(path: Path, contexts: Contexts) -> None:
    """Replaces the file. It is on disk before this returns, whole or not at all."""
    document = {
        "current": contexts.current,
        "contexts": {
            name: {key: value for key, value in asdict(context).items() if key != "name"}
            for name, context in contexts.by_name.items()
        },
    }
    replace_file(path, json.dumps(document, indent=1).encode(), MODE)


def find_context(name: str | None, address: str | None) -> Context | None:
    """The context of a caller.

    Args:
        name: The name that was asked for. None: without an address, that of LEASEHOLD_CONTEXT or the current
            context.
        address: The coordinator's address that was asked for. A socket or a port without TLS has no context.

    Returns:
        The context. None: no context is in use.

    Raises:
        UsageError: There is no context with the name, the address has none, or the file can't be used.
    """
    if name and not _may_have_context(address):
        raise UsageError(f"the context {name!r} is for TLS, and {address} is without: leave one of them out")
    if address and not name:
        return None
    wanted = name or os.environ.get(CONTEXT_VARIABLE)
    if wanted:
        return read_contexts().get(wanted)
    contexts = read_contexts()
    return contexts.get(contexts.current) if contexts.current else None


def environment_context(address: str | None) -> str | None:
    """The name in LEASEHOLD_CONTEXT. None: none, or the address is without TLS and so without contexts."""
    return (os.environ.get(CONTEXT_VARIABLE) or None) if _may_have_context(address) else None


def chosen_coordinator(address: str | None, name: str | None) -> tuple[str, Context | None]:
    """The coordinator of a verb.

    Args:
        address: The option ``--coordinator``. None: not given, so LEASEHOLD_COORDINATOR counts, unless a
            context is named.
        name: The option ``--context``. None: not given, so LEASEHOLD_CONTEXT counts.

    Returns:
        Its address, and the context in use. None: no context is in use.

    Raises:
        UsageError: The address or the name is invalid, or the file of the contexts can't be used.
    """
    if name is None:
        address = address or os.environ.get(COORDINATOR_VARIABLE)
    found = find_context(name or environment_context(address), address)
    return parse_address(address or (found.coordinator if found else None) or configured_coordinator()), found


def _may_have_context(address: str | None) -> bool:
    return not (address or "").startswith((UNIX_SCHEME, INSECURE_SCHEME))
