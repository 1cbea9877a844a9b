"""Identities of Unix users: looked up off the loop, remembered for a while, and never mistaken."""

import asyncio
import os
import pwd
import threading
from types import SimpleNamespace

import pytest
from leasehold_coordinator.api import unix_users
from leasehold_coordinator.api.unix_users import UnixUsers, identity_of
from leasehold_coordinator.errors import FleetError


@pytest.mark.parametrize(
    ("login", "identity"),
    [
        ("ann", "local/ann"),
        ("ann@example.org", "local/ann@example.org"),
        (None, "local/uid-61001"),
        ("", "local/uid-61001"),
        ("a/b", "local/uid-61001"),
        ("DOMAIN\\ann", "local/uid-61001"),
        ("uid-0", "local/uid-61001"),
        ("uid-61001", "local/uid-61001"),
    ],
)
def test_a_login_that_is_no_name_of_an_identity_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, login: str | None, identity: str
) -> None:
    def find(uid: int) -> SimpleNamespace:
        if login is None:
            raise KeyError(uid)
        return SimpleNamespace(pw_name=login)

    monkeypatch.setattr(pwd, "getpwuid", find)
    assert str(identity_of(61_001)) == identity


def test_a_login_is_looked_up_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    users = UnixUsers()
    asked: list[int] = []

    def find(uid: int) -> SimpleNamespace:
        assert threading.current_thread() is not threading.main_thread()
        asked.append(uid)
        return SimpleNamespace(pw_name=f"user{uid}")

    monkeypatch.setattr(pwd, "getpwuid", find)
    monkeypatch.setattr(unix_users, "CACHE_LIMIT", 2)

    async def scenario() -> None:
        for uid in (1, 1, 2, 3, 1):
            assert (await users.identity(uid)).name == f"user{uid}"
        assert asked == [1, 2, 3, 1], "two are remembered"
        monkeypatch.setattr(unix_users, "AGE_LIMIT_S", 0.0)
        await users.identity(1)
        assert asked[4:] == [1]
        assert not users.is_admin(1)
        assert await users.identity(os.geteuid()) == users.own
        assert asked[5:] == [], "the own user is known"

    asyncio.run(scenario())


def test_a_slow_directory_of_users_refuses_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    users = UnixUsers()
    answer = threading.Event()
    monkeypatch.setattr(unix_users, "LOOKUP_S", 0.01)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: answer.wait(20))
    with pytest.raises(FleetError, match="the Unix user 1 can't be looked up"):
        asyncio.run(users.identity(1))
    answer.set()
