"""Chains of forks are ended at their newest process, and processes of others are spared."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from leasehold_worker.host import fork_chains
from leasehold_worker.host.fork_chains import is_related, kill_newest, newest_pid
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity, identify

from tests.fork_chain import CHAIN

GONE = ProcessIdentity(Pid(2**22 + 1), 0)
TIMEOUT_S = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeper() -> Iterator[Callable[..., ProcessIdentity]]:
    """Starts a process that sleeps, with variables."""
    with contextlib.ExitStack() as running:

        def start(**variables: str) -> ProcessIdentity:
            started = running.enter_context(subprocess.Popen(["sleep", "1000"], env=variables))
            running.callback(started.kill)
            identity = identify(started.pid)
            assert identity is not None
            return identity

        yield start


def test_a_chain_of_forks_is_ended(tmp_path: Path) -> None:
    links = tmp_path / "links"
    with subprocess.Popen([sys.executable, "-c", CHAIN, links], env={"MARK": str(links)}) as first:
        assert first.wait(TIMEOUT_S) == 0
    wait_until(lambda: links.exists() and links.stat().st_size > 10)
    is_member = partial(is_related, relatives=(), strangers=(), mark=f"MARK={links}", mark_uid=os.getuid())
    killed: set[ProcessIdentity] = set()

    def has_ended() -> bool:
        killed.update(kill_newest(is_member, 1.0))
        return has_stopped(links)

    wait_until(has_ended)
    assert killed
    assert links.stat().st_size < 20_000, "the chain ended by itself"


def has_stopped(links: Path) -> bool:
    """Whether no link was added for a while."""
    size = links.stat().st_size
    time.sleep(0.3)
    return links.stat().st_size == size


def test_the_newest_process_is_spared_if_it_is_no_member(sleeper: Callable[..., ProcessIdentity]) -> None:
    stranger = sleeper(MARK="mine")
    assert kill_newest(lambda _: False, 1.0) == set()
    assert identify(stranger.pid) == stranger


def test_who_is_related(sleeper: Callable[..., ProcessIdentity]) -> None:
    marked, unmarked = sleeper(MARK="mine"), sleeper(MARK="another")
    me = identify(os.getpid())
    assert me is not None
    uid = os.getuid()
    assert is_related(unmarked, [unmarked], [], "", None), "it is a relative"
    assert is_related(unmarked, [me], [], "", None), "its parent is a relative"
    assert is_related(marked, [GONE], [GONE], "MARK=mine", uid), "it has the mark"
    assert not is_related(unmarked, [GONE], [], "MARK=mine", uid)
    assert not is_related(marked, [GONE], [], "MARK=mine", uid + 1), "another user has set the variable"
    assert not is_related(marked, [GONE], [], "MARK=mine", None)
    assert not is_related(marked, [GONE], [], "", uid), "no process is marked"
    assert not is_related(marked, [GONE], [me], "MARK=mine", uid), "its parent is a stranger"
    assert is_related(marked, [marked], [me], "MARK=mine", uid), "the nearest ancestor decides"
    session = ProcessIdentity(Pid(os.getsid(0)), 0)
    assert not is_related(marked, [GONE], [session], "MARK=mine", uid), "its session is a stranger's"


def test_a_kernel_that_does_not_tell_the_newest_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert newest_pid() is not None
    monkeypatch.setattr(fork_chains, "PROC", tmp_path)
    assert newest_pid() is None
    assert kill_newest(lambda _: True, 1.0) == set()
    (tmp_path / "loadavg").write_text("0.00 0.00 0.00 1/2 many\n")
    assert newest_pid() is None
