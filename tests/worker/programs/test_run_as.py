"""Which Unix user a workload of an owner gets, and who never gets any."""

import os
import pwd

import pytest
from leasehold.v1 import errors_pb2
from leasehold_worker.errors import OperationError, StartError
from leasehold_worker.host import accounts
from leasehold_worker.host.accounts import Account
from leasehold_worker.programs import run_as
from leasehold_worker.programs.run_as import RunAs, RunAsSetting, check_run_as, is_loopback

OWN = pwd.getpwuid(os.geteuid()).pw_name
LOOPBACK = "127.0.0.1:7401"
ALICE = {"user/alice": "2001:2002"}


async def account(
    setting: RunAsSetting, owner: str, *, min_uid: int = 1000, coordinator: str = "node1:7401"
) -> Account | None:
    return await RunAs(setting, min_uid, coordinator=coordinator, user=OWN).account(owner)


async def refusal(
    setting: RunAsSetting, owner: str, *, min_uid: int = 1000, coordinator: str = "node1:7401"
) -> str:
    with pytest.raises(OperationError) as raised:
        await account(setting, owner, min_uid=min_uid, coordinator=coordinator)
    assert raised.value.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
    return raised.value.message


async def test_a_map_gives_its_owners_their_users() -> None:
    found = await account(ALICE, "user/alice")
    assert found == Account(2001, 2002, (2002,), "2001")
    assert found.ids == "2001:2002:2002"


@pytest.mark.parametrize("owner", ["user/bob", "local/alice", "user/alice2", "", "host/alpha/alice"])
async def test_an_owner_without_a_user_is_refused(owner: str) -> None:
    assert "names no Unix user" in await refusal(ALICE, owner)


async def test_one_user_may_be_for_all() -> None:
    assert (await account("2001:2001", "service/batch")) is not None


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ("root", "root"),
        ("0:2001", "root"),
        ("2001:0", "root"),
        ("65534:2001", "65534"),
        ("2001:65534", "65534"),
        ("999:2001", "below run_as_min_uid 1000"),
        ("4294967295:2001", "no id"),
        ("2001:4294967295", "no id"),
        ("no-such-user-here", "no such user"),
    ],
)
async def test_users_that_no_setting_permits(user: str, why: str) -> None:
    assert why in await refusal({"user/alice": user}, "user/alice")


async def test_a_member_of_the_group_of_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Account(2001, 2001, (0, 2001), "alice")
    monkeypatch.setattr(run_as, "find_account", lambda _: member)
    assert "root's group" in await refusal(ALICE, "user/alice")


async def test_the_same_name_is_for_users_and_on_loopback_for_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_as, "find_account", lambda name: Account(2001, 2001, (2001,), name))
    assert (await account("same-name", "user/alice")) == Account(2001, 2001, (2001,), "alice")
    assert (await account("same-name", "local/alice", coordinator=LOOPBACK)) is not None
    for owner in ("local/alice", "service/alice", "", "user/", "user/2001:999", "user/a/b", "user/alice\n"):
        await refusal("same-name", owner)
    await refusal("same-name", "service/alice", coordinator=LOOPBACK)


@pytest.mark.parametrize("name", ["2001:2001", "2001:6", "ali\0ce", "-alice", "a/b", "a" * 65])
async def test_the_same_name_of_an_owner_is_a_name_and_no_number(name: str) -> None:
    assert "names no Unix user" in await refusal("same-name", f"user/{name}")


async def test_the_same_name_is_the_same_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of users may ignore the case of letters, or add a domain."""
    monkeypatch.setattr(run_as, "find_account", lambda _: Account(2001, 2001, (2001,), "alice"))
    assert "calls Alice alice" in await refusal("same-name", "user/Alice")
    assert (await account({"user/Alice": "alice@corp"}, "user/Alice")) is not None


async def test_the_own_user_of_a_worker_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Account(2001, 2001, (2001,), "agent")
    monkeypatch.setattr(run_as, "find_account", lambda _: own)
    monkeypatch.setattr(os, "geteuid", lambda: 2001)
    assert "the worker's own user" in await refusal("same-name", "user/agent")
    assert (await account({"user/alice": "agent"}, "user/alice")) is None


async def test_without_a_setting_only_the_own_user_starts_programs_and_only_on_loopback() -> None:
    for owner in ("", "local/root", f"local/{OWN}"):
        assert (await account("", owner, coordinator=LOOPBACK)) is None
        assert await refusal("", owner) == (
            "the coordinator node1:7401 counts as another host, since its address is not loopback, and the "
            "worker's run_as is not set: set run_as in the worker's settings, or start the worker with "
            "--coordinator 127.0.0.1:7401 if the coordinator is on this host and its worker_listen includes "
            "127.0.0.1"
        )
        assert await refusal("", owner, coordinator=f"insecure:{LOOPBACK}") == (
            "the worker's connection to the coordinator insecure:127.0.0.1:7401 has no TLS, and the worker's "
            "run_as is not set: set run_as in the worker's settings"
        )
    for owner in ("user/root", "local/somebody-else", f"user/{OWN}", "service/batch"):
        assert "not the worker's user" in await refusal("", owner, coordinator=LOOPBACK)
        assert (await refusal("", owner)).endswith(
            "set run_as in the worker's settings"
        )  # loopback is no help


async def test_a_directory_of_users_that_hangs_is_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_as, "LOOK_UP_TIMEOUT_S", 0.0)
    with pytest.raises(OperationError) as raised:
        await account(ALICE, "user/alice")
    assert raised.value.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS


@pytest.mark.parametrize("setting", [{"alice": "alice"}, {"worker/a": "alice"}, {"user/alice": ""}])
def test_a_map_of_nobody_is_refused_at_the_start(setting: RunAsSetting) -> None:
    with pytest.raises(StartError, match="run_as"):
        check_run_as(setting, 1000)


def test_root_can_not_be_permitted() -> None:
    with pytest.raises(StartError, match="run_as_min_uid"):
        check_run_as(ALICE, 0)


def test_a_user_of_the_directory_has_all_of_its_groups() -> None:
    entry = pwd.getpwuid(os.geteuid())
    found = accounts.find_account(entry.pw_name)
    assert (found.uid, found.gid, found.home) == (entry.pw_uid, entry.pw_gid, entry.pw_dir)
    assert set(found.groups) == {*os.getgrouplist(entry.pw_name, entry.pw_gid)}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7401", True),
        ("127.8.9.10:1", True),
        ("localhost:7401", True),
        ("[::1]:7401", True),
        ("10.0.0.1:7401", False),
        ("127.0.0.1.example.com:7401", False),
        ("localhost.example.com:7401", False),
    ],
)
def test_loopback_is_a_name_or_a_literal(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
