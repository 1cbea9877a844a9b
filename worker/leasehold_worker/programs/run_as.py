"""The Unix users that workloads run as: the worker's setting ``run_as``, and what it never permits."""

import os
import re
from typing import Final, TypeAlias, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError, StartError
from leasehold_worker.host.accounts import Account, find_account
from leasehold_worker.threads import run_in_thread

RunAsSetting: TypeAlias = str | dict[str, str]

SAME_NAME: Final = "same-name"
MIN_UID: Final = 1000
NOBODY: Final = 65534
NO_ID: Final = 2**32 - 1
"""The number by which setresuid(2) and setresgid(2) change nothing."""

LOOK_UP_TIMEOUT_S: Final = 10.0
"""Timeout of the host's directory of users (NSS), which may ask a server."""

TOLD_LIMIT: Final = 128
"""Characters of an owner in a message."""

_look_ups: Final = trio.CapacityLimiter(4)
"""Threads that ask the directory, including those that hang."""

_OWNER: Final = re.compile(r"(local|user|service)/[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", re.ASCII)


def check_run_as(setting: RunAsSetting, min_uid: int) -> None:
    """Refuses a setting that maps nobody.

    Raises:
        StartError: The setting has a key that is no owner, or an empty user.
    """
    if min_uid < 1:
        raise StartError(f"run_as_min_uid {min_uid} would permit root: give 1 or more")
    for owner, user in setting.items() if isinstance(setting, dict) else ():
        if not _OWNER.fullmatch(owner):
            raise StartError(
                f"run_as has the key {owner!r}, which is no owner: write it like user/alice, local/alice or "
                "service/batch"
            )
        if not user:
            raise StartError(f"run_as maps {owner} to no Unix user: name one, or remove the key")


@final
class RunAs:
    """The Unix users of one worker's workloads.

    Args:
        setting: A map of owners to Unix users, ``same-name``, or the Unix user of all workloads. Empty: only
            the worker's own user starts programs, and only for a coordinator on loopback.
        min_uid: The smallest permitted user id.
        coordinator: The coordinator's address.
        user: Name of the worker's user.
    """

    def __init__(self, setting: RunAsSetting, min_uid: int, *, coordinator: str, user: str) -> None:
        self._setting = setting
        self._min_uid = min_uid
        self._coordinator = coordinator
        self._on_loopback = is_loopback(coordinator)
        self._user = user

    @property
    def is_set(self) -> bool:
        """Whether the setting maps anybody."""
        return bool(self._setting)

    async def account(self, owner: str) -> Account | None:
        """The Unix user of an owner's workloads, looked up now. None: the worker's own user.

        Raises:
            OperationError: NOT_PERMITTED: the setting maps the owner to no permitted user.
                PERMISSION_OR_OS: the host's directory of users does not answer.
        """
        told = owner[:TOLD_LIMIT]
        if not self._setting:
            await trio.lowlevel.checkpoint()
            self._require_own(told)
            return None
        name = self._name(owner)
        if name is None:
            raise _refused(f"the worker's run_as names no Unix user for {told or 'an unknown owner'}")
        try:
            with trio.fail_after(LOOK_UP_TIMEOUT_S):
                account = await run_in_thread(find_account, name, abandon_on_cancel=True, limiter=_look_ups)
        except LookupError:
            raise _refused(
                f"run_as maps {told} to {name[:TOLD_LIMIT]!r}, and this host has no such user"
            ) from None
        except (trio.TooSlowError, OSError) as error:
            why = getattr(error, "strerror", None) or f"no answer within {LOOK_UP_TIMEOUT_S:g} s"
            raise OperationError(
                errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
                f"the Unix user {name!r} can't be looked up ({why}): check the host's directory of users",
            ) from None
        if self._setting == SAME_NAME and account.name != name:  # identities differ in their letters
            raise _refused(
                f"run_as is same-name, and the host's directory of users calls {name} {account.name}"
            )
        self._require_permitted(told, account)
        return None if account.uid == os.geteuid() else account

    def _name(self, owner: str) -> str | None:
        """The login name for an owner. None: there is none."""
        if isinstance(self._setting, dict):
            return self._setting.get(owner)
        if self._setting != SAME_NAME:
            return self._setting
        if not _OWNER.fullmatch(owner):  # no name has the form of UID:GID
            return None
        kind, _, name = owner.partition("/")
        # Another host's LOGIN can be another person.
        permitted = ("user", "local") if self._on_loopback else ("user",)
        return name if kind in permitted else None

    def _require_own(self, owner: str) -> None:
        """Refuses an owner who does not have the rights of the worker's user anyway."""
        is_own = owner in ("", "local/root", f"local/{self._user}")
        if not self._on_loopback:
            why = elsewhere(self._coordinator, is_own=is_own)
            raise OperationError(errors_pb2.ERROR_REASON_NOT_PERMITTED, why)
        if not is_own:
            raise _refused(f"{owner} is not the worker's user, and the worker's run_as is not set")

    def _require_permitted(self, owner: str, account: Account) -> None:
        if why := why_forbidden(account, self._setting, self._min_uid):
            raise _refused(f"run_as maps {owner} to {account.name}, which is {why}")


def why_forbidden(account: Account, setting: RunAsSetting, min_uid: int) -> str:
    """Why no owner may be mapped to a Unix user. Empty: one may."""
    uid, groups = account.uid, {account.gid, *account.groups}
    if uid == 0 or 0 in groups:
        return "root, or a member of root's group"
    if NOBODY in {uid, account.gid}:
        return f"the user or group {NOBODY} of everything unmapped"
    if max(uid, account.gid) >= NO_ID:
        return f"no id of a user and a group, which are below {NO_ID}"
    if uid < min_uid:
        return f"user id {uid}, below run_as_min_uid {min_uid}"
    if uid == os.geteuid() and setting == SAME_NAME:
        return "the worker's own user, which same-name does not permit"
    return ""


def elsewhere(coordinator: str, *, is_own: bool = True) -> str:
    """Why a worker without run_as starts no program for a coordinator that is not on loopback with TLS.

    Args:
        coordinator: The address of the coordinator.
        is_own: Whether the owner has the rights of the worker's user, and so needs no run_as on loopback.
    """
    unset = "and the worker's run_as is not set: set run_as in the worker's settings"
    if coordinator.startswith("insecure:"):
        return f"the worker's connection to the coordinator {coordinator} has no TLS, {unset}"
    why = f"the coordinator {coordinator} counts as another host, since its address is not loopback, {unset}"
    if not is_own:
        return why
    port = coordinator.rpartition(":")[2]
    return (
        f"{why}, or start the worker with --coordinator 127.0.0.1:{port} if the coordinator is on this host "
        "and its worker_listen includes 127.0.0.1"
    )


def _refused(why: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        f"{why}: set run_as in the worker's settings, or choose another worker",
    )


def is_loopback(address: str) -> bool:
    """Whether a HOST:PORT is of this host: ``localhost``, or a literal of loopback.

    ``insecure:HOST:PORT`` is not: each user of this host could listen there while the coordinator is down.
    """
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host == "::1" or bool(re.fullmatch(r"127(\.[0-9]{1,3}){3}", host, re.ASCII))
