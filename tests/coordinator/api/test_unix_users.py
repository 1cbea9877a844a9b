"""Lookups of login names by a slow directory of users."""

import asyncio

import pytest
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.api import unix_users
from leasehold_coordinator.api.unix_users import UnixUsers
from leasehold_coordinator.errors import FleetError

from tests.coordinator.unix_users import ANN, BEN


def test_many_calls_of_a_user_take_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookups of other users would wait for all of them."""
    looked_up: list[int] = []

    def identity_of(uid: int) -> Identity:
        looked_up.append(uid)
        return Identity(Kind.LOCAL, f"uid-{uid}")

    async def scenario() -> None:
        users = UnixUsers()
        monkeypatch.setattr(unix_users, "identity_of", identity_of)
        found = await asyncio.gather(*(users.identity(uid) for uid in [ANN] * 20 + [BEN]))
        assert {str(one) for one in found} == {f"local/uid-{ANN}", f"local/uid-{BEN}"}

    asyncio.run(scenario())
    assert looked_up == [ANN, BEN]


def test_a_lookup_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []

    def identity_of(uid: int) -> Identity:
        looked_up.append(uid)
        if len(looked_up) == 1:
            raise OSError("no directory")
        return Identity(Kind.LOCAL, "ann")

    async def scenario() -> None:
        users = UnixUsers()
        monkeypatch.setattr(unix_users, "identity_of", identity_of)
        with pytest.raises(FleetError, match="can't be looked up"):
            await users.identity(ANN)
        assert str(await users.identity(ANN)) == "local/ann"

    asyncio.run(scenario())
