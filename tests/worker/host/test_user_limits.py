"""What pam_limits makes of the lines of limits.conf(5), by its rules of domains, items and values."""

import resource
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.user_limits import (
    SELECT_LIMIT,
    UNLIMITED,
    HostLimits,
    Limit,
    encode,
    parse_lines,
    resolve,
)

ALICE = Account(2001, 2002, (2002, 3000), "alice")
GROUPS = {"users": 2002, "gpu": 3000, "others": 4000}
COUNT = resource.RLIMIT_RTTIME + 1
OWN: Limit = (1000, 5000)
HOST = HostLimits([OWN] * COUNT, [(2000, 4000)] * COUNT, may_raise=False, most_descriptors=3000)
USUAL: Limit = (1000, 4000)
"""What an item has without a line."""


def limits(text: str, host: HostLimits = HOST) -> tuple[list[Limit], list[str]]:
    lines, problems = parse_lines(text, "limits.conf")
    assert problems == []
    return resolve(lines, ALICE, GROUPS.get, host)


def nproc(text: str, host: HostLimits = HOST) -> Limit:
    return limits(text, host)[0][resource.RLIMIT_NPROC]


@pytest.mark.parametrize(
    "domain",
    [
        "alice",
        "*",
        "@users",
        "@gpu",
        "2001:2001",
        "2000:2005",
        ":2001",
        "2001:",
        "@:2002",
        "@:3000",
        "@2002:",
    ],
)
def test_a_domain_that_is_the_users(domain: str) -> None:
    assert nproc(f"{domain} - nproc 10") == (10, 10)


@pytest.mark.parametrize(
    "domain",
    [
        "bob",
        "Alice",
        "@others",
        "@nobody-knows",
        "@alice",
        "2002:",
        ":2002",
        "1:2000",
        "@3000:3000",
        "@:2001",
    ],
)
def test_a_domain_of_others(domain: str) -> None:
    """A range of groups counts for the primary group only."""
    assert nproc(f"{domain} - nproc 10") == USUAL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alice - nproc 1\n@gpu - nproc 2\n* - nproc 3", (1, 1)),
        ("@gpu - nproc 2\n* - nproc 3", (2, 2)),
        ("2001: - nproc 1\nalice - nproc 2", (2, 2)),  # a range is as specific as the name
        ("alice - nproc 2\n2001: - nproc 1", (1, 1)),
        ("* - nproc 3\nalice soft nproc 1", (1, 3)),  # each side by itself
        ("alice soft nproc 1\n* - nproc 3", (1, 4000)),  # but the rest of the line falls with its soft limit
        ("alice hard nproc 3\n* - nproc 1", (1, 3)),
        ("* - nproc 3\n* hard nproc 2", (2, 2)),  # soft is never above hard
        ("* soft nproc 30", (30, 4000)),
        ("* hard nproc 30", (30, 30)),
        ("* hard nproc 2000", (1000, 2000)),
        ("@gpu -\n* - nproc 3", USUAL),  # no line counts for its users
        ("* - nproc 3\n:2001 -", USUAL),
        ("* -\n@others -\n* - nproc 3", (3, 3)),
        ("* - maxlogins 1\n% - maxlogins 4\n%gpu - maxlogins 2\n* - priority -5", USUAL),
        ("  # * - nproc 1\n\n*\tSOFT  NProc 30 # more", (30, 4000)),
    ],
)
def test_the_line_that_counts(text: str, expected: Limit) -> None:
    assert nproc(text) == expected
    assert limits(text)[1] == []


RAISED = HostLimits([(UNLIMITED, UNLIMITED)] * COUNT, HOST.first, may_raise=True, most_descriptors=3000)


@pytest.mark.parametrize(
    ("item", "value", "number", "expected"),
    [
        ("core", "2", resource.RLIMIT_CORE, 2048),
        ("cpu", "2", resource.RLIMIT_CPU, 120),
        ("msgqueue", "2", resource.RLIMIT_MSGQUEUE, 2),
        ("locks", "2", 10, 2),
        ("rtprio", "9", resource.RLIMIT_RTPRIO, 9),
        ("nice", "-20", resource.RLIMIT_NICE, 40),
        ("nice", "-1", resource.RLIMIT_NICE, 21),
        ("nice", "99", resource.RLIMIT_NICE, 1),
        ("as", "-1", resource.RLIMIT_AS, UNLIMITED),
        ("as", "unlimited", resource.RLIMIT_AS, UNLIMITED),
        ("memlock", "infinity", resource.RLIMIT_MEMLOCK, UNLIMITED),
        ("memlock", "9" * 25, resource.RLIMIT_MEMLOCK, UNLIMITED),
        ("nofile", "unlimited", resource.RLIMIT_NOFILE, 3000),
    ],
)
def test_items_and_their_units(item: str, value: str, number: int, expected: int) -> None:
    found, differences = limits(f"* - {item} {value}", RAISED)
    assert found[number] == (expected, expected)
    assert differences == []


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice hard",
        "alice hard nproc",
        "alice - nproc",
        "alice firm nproc 1",
        "alice - files 1",
        "alice - nproc lots",
        "alice - nproc 1k",
        "alice - nproc -5",
        "alice - nice unlimited",
        ": - nproc 1",
        "@: - nproc 1",
        "a:b - nproc 1",
        "1:2:3 - nproc 1",
    ],
)
def test_an_invalid_line_is_told_and_changes_nothing(line: str) -> None:
    lines, problems = parse_lines(f"* - nproc 10\n{line}\n", "limits.conf")
    assert len(lines) == 1
    assert problems == ["limits.conf: line 2 is invalid and was ignored: correct it by limits.conf(5)"]


WORDS = st.sampled_from(
    [*"@%:*#-\0 \n\t", "1", "99999999999", "alice", "@gpu", "soft", "nofile", "nice", "cpu", "-1"]
)


@given(st.lists(WORDS).map("".join) | st.lists(WORDS, max_size=20).map(" ".join))
def test_no_text_is_more_than_invalid(text: str) -> None:
    found, _ = resolve(parse_lines(text, "limits.conf")[0], ALICE, GROUPS.get, HOST)
    assert all(0 <= soft <= hard <= OWN[1] for soft, hard in found)


def test_of_many_invalid_lines_some_are_named() -> None:
    _, problems = parse_lines("?\n" * 1000, "limits.conf")
    assert len(problems) == 1
    assert "line 1, 2, 3, 4, 5 and 995 more is invalid" in problems[0]


def test_without_a_line_neither_the_worker_nor_pid_1_gives_more_than_it_has() -> None:
    found, differences = limits("")
    assert found[resource.RLIMIT_NPROC] == USUAL
    assert limits("", replace(RAISED, first=HOST.own))[0][resource.RLIMIT_NPROC] == OWN
    assert differences == []


def test_without_a_line_the_descriptors_are_those_of_a_login() -> None:
    """pid 1 is systemd, and its limits are its own."""
    many = HostLimits([(9000, 9000)] * COUNT, [(8000, 8000)] * COUNT, may_raise=True, most_descriptors=7000)
    found, differences = limits("", many)
    assert found[resource.RLIMIT_NOFILE] == (SELECT_LIMIT, 7000)
    assert found[resource.RLIMIT_NPROC] == (8000, 8000)
    assert differences == []


@pytest.mark.parametrize(
    ("text", "granted", "asked"),
    [
        ("* - nproc 6000", (5000, 5000), "6000:6000"),
        ("* hard nproc unlimited", (1000, 5000), "1000:unlimited"),
        ("* soft nproc 4500", (4000, 4000), "4500:4000"),
    ],
)
def test_a_limit_that_the_worker_may_not_give_is_told(text: str, granted: Limit, asked: str) -> None:
    found, (difference,) = limits(text)
    assert found[resource.RLIMIT_NPROC] == granted
    assert difference == (
        f"user alice has the limit nproc {granted[0]}:{granted[1]} (soft:hard), and not {asked} as in "
        "/etc/security: raise LimitNPROC of the worker's unit, or correct the line"
    )


def test_a_worker_that_may_raise_limits_does_so() -> None:
    may = replace(HOST, may_raise=True)
    assert limits("* - nproc 6000", may)[1] == []
    assert nproc("* - nproc 6000", may) == (6000, 6000)
    assert limits("* - nofile 6000", may)[0][resource.RLIMIT_NOFILE] == (3000, 3000)
    assert len(limits("* - nofile 6000", may)[1]) == 1, "the kernel permits nobody more"


def test_children_get_the_limits_by_their_numbers() -> None:
    assert encode([(1, 2), (3, UNLIMITED), (UNLIMITED, UNLIMITED)]) == "0:1:2,1:3:-1,2:-1:-1"
