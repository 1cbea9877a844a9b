"""Unix users that programs run as, from the host's directory of users (NSS) or given by number."""

import os
import pwd
import re
from typing import Final

import msgspec

from leasehold_worker.host.process_files import read_status

_NUMBERS: Final = re.compile(r"([0-9]{1,10}):([0-9]{1,10})", re.ASCII)


class Account(msgspec.Struct, frozen=True):
    """A Unix user.

    Attributes:
        uid: The user id.
        gid: The id of its group.
        groups: The ids of its supplementary groups.
        name: The login name, or the number.
        home: The home directory.
        shell: The login shell.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str = "/"
    shell: str = "/bin/sh"

    @property
    def ids(self) -> str:
        """All ids as ``UID:GID:GROUP,GROUP``, for children that take on this user."""
        return f"{self.uid}:{self.gid}:{','.join(map(str, self.groups))}"


def find_account(text: str) -> Account:
    """The Unix user with a login name, or with numbers such as ``2001:2001``. The directory may block.

    A user by numbers has no supplementary groups, and needs no entry in the directory.

    Raises:
        LookupError: The directory has no such user.
    """
    if numbers := _NUMBERS.fullmatch(text):
        return numbered_account(int(numbers[1]), int(numbers[2]))
    entry = pwd.getpwnam(text)
    groups = sorted({entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)})
    home, shell = entry.pw_dir or "/", entry.pw_shell or "/bin/sh"
    return Account(entry.pw_uid, entry.pw_gid, tuple(groups), entry.pw_name, home, shell)


def numbered_account(uid: int, gid: int) -> Account:
    """The Unix user with these numbers, without supplementary groups."""
    return Account(uid, gid, (gid,), str(uid))


def account_of(pid: int) -> Account | None:
    """The Unix user that a process runs as, by its numbers. None: it is gone."""
    facts = read_status(pid)
    uids, gids = facts.get("Uid", "").split(), facts.get("Gid", "").split()
    if len(uids) < 2 or len(gids) < 2:
        return None
    groups = tuple(int(group) for group in facts.get("Groups", "").split())
    return Account(int(uids[1]), int(gids[1]), groups, uids[1])
