"""The limits of a Unix user's logins, as pam_limits(8) makes them of the lines of limits.conf(5). No I/O.

A line counts by its most specific domain: the user's name or a range of user ids, then a group or a range of
group ids, then ``*``. The last of several such lines counts. An item without a line has the lower one of two
limits: that of the worker and that of pid 1. The worker's unit may permit the worker more than a login has,
and systemd as pid 1 permits itself more.
"""

import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from leasehold_worker.host.accounts import Account

Limit: TypeAlias = tuple[int, int]
"""Soft and hard limit, in the units of setrlimit(2)."""

Side: TypeAlias = Literal["soft", "hard"]

UNLIMITED: Final = 2**63 - 1
"""Greater limits are none: Python's setrlimit takes none, and no kernel reaches one."""

SELECT_LIMIT: Final = 1024
"""The soft limit of descriptors that select(2) can serve. systemd gives it to logins, and itself more."""

LINES_TOLD: Final = 5
"""Named invalid lines of a file."""

_KIB: Final = 1024
_LOCKS: Final = 10
"""RLIMIT_LOCKS, which Python lacks."""

_ITEMS: Final = {
    "cpu": (resource.RLIMIT_CPU, 60),
    "fsize": (resource.RLIMIT_FSIZE, _KIB),
    "data": (resource.RLIMIT_DATA, _KIB),
    "stack": (resource.RLIMIT_STACK, _KIB),
    "core": (resource.RLIMIT_CORE, _KIB),
    "rss": (resource.RLIMIT_RSS, _KIB),
    "nproc": (resource.RLIMIT_NPROC, 1),
    "nofile": (resource.RLIMIT_NOFILE, 1),
    "memlock": (resource.RLIMIT_MEMLOCK, _KIB),
    "as": (resource.RLIMIT_AS, _KIB),
    "locks": (_LOCKS, 1),
    "sigpending": (resource.RLIMIT_SIGPENDING, 1),
    "msgqueue": (resource.RLIMIT_MSGQUEUE, 1),
    "nice": (resource.RLIMIT_NICE, 1),
    "rtprio": (resource.RLIMIT_RTPRIO, 1),
}
"""Number and unit of each item."""

_NAMES: Final = {number: name for name, (number, _) in _ITEMS.items()}
_WITHOUT_LIMIT: Final = ("maxlogins", "maxsyslogins", "priority", "nonewprivs", "chroot")
"""Items that are no limits of a process."""

_RANGE: Final = re.compile(r"([0-9]{0,10}):([0-9]{0,10})", re.ASCII)
_EVERYBODY, _GROUP, _USER = range(3)


@dataclass(frozen=True, slots=True)
class LimitLine:
    """A valid line of limits.conf(5).

    Attributes:
        domain: The users.
        sides: The limits that it sets.
        number: The resource. None: it exempts its users from all lines.
        value: The limit.
    """

    domain: str
    sides: tuple[Side, ...]
    number: int | None
    value: int


@dataclass(frozen=True, slots=True)
class HostLimits:
    """The limits of a host's processes, by the numbers of the resources.

    Attributes:
        own: The worker's at its start.
        first: Those of pid 1.
        may_raise: Whether the worker may raise a hard limit.
        most_descriptors: The kernel's limit of descriptors (fs.nr_open).
    """

    own: Sequence[Limit]
    first: Sequence[Limit]
    may_raise: bool
    most_descriptors: int


def parse_lines(text: str, source: str) -> tuple[list[LimitLine], list[str]]:
    """The valid lines of a file, and its problems.

    Args:
        text: The content.
        source: The file, for the problems.
    """
    lines, invalid = list[LimitLine](), list[str]()
    for number, text_line in enumerate(text.split("\n"), 1):
        words = text_line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            line = _line(*words[:4])
        except (TypeError, ValueError):
            invalid.append(str(number))
        else:
            lines += [line] if line is not None else []
    if not invalid:
        return lines, []
    more = f" and {len(invalid) - LINES_TOLD} more" if len(invalid) > LINES_TOLD else ""
    told = f"line {', '.join(invalid[:LINES_TOLD])}{more}"
    return lines, [f"{source}: {told} is invalid and was ignored: correct it by limits.conf(5)"]


def _line(domain: str, kind: str, item: str | None = None, value: str = "") -> LimitLine | None:
    """A line. None: it sets no limit of a process.

    Raises:
        ValueError: It is invalid.
    """
    if domain.startswith("%"):  # it counts logins
        return None
    _id_range(domain.lstrip("@"))
    if item is None and kind == "-":
        return LimitLine(domain, (), None, 0)
    if item is None or not value:
        raise ValueError("too few words")
    kind, item, value = kind.lower(), item.lower(), value.lower()
    if item in _WITHOUT_LIMIT:
        return None
    sides: dict[str, tuple[Side, ...]] = {"soft": ("soft",), "hard": ("hard",), "-": ("soft", "hard")}
    if kind not in sides or item not in _ITEMS:
        raise ValueError("unknown type or item")
    return LimitLine(domain, sides[kind], _ITEMS[item][0], _value(item, value))


def _value(item: str, text: str) -> int:
    if item == "nice":  # -20 is the highest priority, and RLIMIT_NICE counts from the lowest
        if not re.fullmatch(r"[+-]?[0-9]{1,9}", text, re.ASCII):
            raise ValueError(text)
        return 20 - max(-20, min(19, int(text)))
    if text in ("-1", "-", "unlimited", "infinity"):
        return UNLIMITED
    if not re.fullmatch(r"[0-9]{1,30}", text, re.ASCII):
        raise ValueError(text)
    return min(int(text) * _ITEMS[item][1], UNLIMITED)


def _id_range(text: str) -> tuple[int, int] | None:
    """The ids of ``MIN:MAX``, ``MIN:`` or ``:ID``. None: the text is no range.

    Raises:
        ValueError: It is an invalid one.
    """
    if ":" not in text:
        return None
    found = _RANGE.fullmatch(text)
    if found is None or text == ":":
        raise ValueError(text)
    low, high = found.groups()
    return int(low or high), int(high or UNLIMITED)


def _rank(domain: str, account: Account, gid_of: Callable[[str], int | None]) -> int | None:
    """How specific a domain is, if the user belongs to it."""
    ids = _id_range(domain.lstrip("@"))
    if domain.startswith("@"):
        groups = {account.gid, *account.groups}
        if ids is None:
            return _GROUP if gid_of(domain[1:]) in groups else None
        if domain.startswith("@:"):
            return _GROUP if ids[0] in groups else None
        return _GROUP if ids[0] <= account.gid <= ids[1] else None
    if ids is not None:
        return _USER if ids[0] <= account.uid <= ids[1] else None
    if domain == account.name:
        return _USER
    return _EVERYBODY if domain == "*" else None


def _named(
    lines: Sequence[LimitLine], account: Account, gid_of: Callable[[str], int | None]
) -> Mapping[tuple[int, Side], int]:
    """The values that the lines give a user."""
    named: dict[tuple[int, Side], tuple[int, int]] = {}
    for line in lines:
        rank = _rank(line.domain, account, gid_of)
        if rank is None:
            continue
        if line.number is None:
            if rank != _EVERYBODY:
                return {}
            continue
        for side in line.sides:
            if named.get((line.number, side), (rank, 0))[0] > rank:
                break  # with the soft limit, pam_limits skips the hard limit of the line
            named[line.number, side] = rank, line.value
    return {key: value for key, (_, value) in named.items()}


def resolve(
    lines: Sequence[LimitLine], account: Account, gid_of: Callable[[str], int | None], host: HostLimits
) -> tuple[list[Limit], list[str]]:
    """The limits of a user's programs by the numbers of the resources, and where they differ from the lines.

    Args:
        lines: The lines in the order of pam_limits.
        account: The user, who is not root: group and ``*`` would not count.
        gid_of: Id of a group by its name. None: there is none.
        host: The limits of processes on this host.
    """
    named = _named(lines, account, gid_of)
    limits, differences = list[Limit](), list[str]()
    for number, (own, first) in enumerate(zip(host.own, host.first, strict=False)):
        ceiling = UNLIMITED if host.may_raise else own[1]
        usual_soft = min(own[0], first[0])
        asked: dict[Side, int] = {side: value for (item, side), value in named.items() if item == number}
        if number == resource.RLIMIT_NOFILE:
            ceiling = min(ceiling, host.most_descriptors)
            usual_soft = min(usual_soft, SELECT_LIMIT)
            asked = {
                side: host.most_descriptors if value == UNLIMITED else value for side, value in asked.items()
            }
        hard = asked.get("hard", min(own[1], first[1], ceiling))
        soft = asked.get("soft", min(usual_soft, hard))
        if "hard" in asked:
            soft = min(soft, hard)
        granted_hard = min(hard, ceiling)
        granted = min(soft, granted_hard), granted_hard
        limits.append(granted)
        if granted != (soft, hard):
            name = _NAMES[number]
            differences.append(
                f"user {account.name} has the limit {name} {_text(granted)} (soft:hard), and not "
                f"{_text((soft, hard))} as in /etc/security: raise "
                f"Limit{name.upper()} of the worker's unit, or correct the line"
            )
    return limits, differences


def encode(limits: Sequence[Limit]) -> str:
    """Limits as ``RESOURCE:SOFT:HARD,…`` for children of the worker. -1: unlimited."""
    pairs = (tuple(-1 if value >= UNLIMITED else value for value in limit) for limit in limits)
    return ",".join(f"{number}:{soft}:{hard}" for number, (soft, hard) in enumerate(pairs))


def _text(limit: Limit) -> str:
    return ":".join("unlimited" if value >= UNLIMITED else str(value) for value in limit)
