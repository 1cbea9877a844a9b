"""Who may call the checkpoint API on a process, as seen on driver 580.159.04 (H100)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost

from .programs import (
    CHILD,
    NOT_INITIALIZED,
    OPERATING_SYSTEM,
    RUNNING,
    SUCCESS,
    Program,
    environment_of,
)
from .users import as_user, needs_root, share, skip_if_unreadable

pytestmark = needs_root

NOBODY, DAEMON, ROOT = 65534, 1, 0
StartAs = Callable[..., Program]


@pytest.fixture
def variables(host: SimulatedHost, tmp_path: Path) -> Mapping[str, str]:
    """The environment of a host that all users share."""
    skip_if_unreadable(CHILD)
    return share(host, tmp_path / "shared")


@pytest.fixture
def start_as(variables: Mapping[str, str]) -> Iterator[StartAs]:
    """Starts programs as users with capabilities."""
    started: list[Program] = []

    def start(uid: int, *capabilities: str) -> Program:
        wrapper = () if uid == ROOT else as_user(uid, *capabilities)
        program = Program(environment_of(variables), wrapper)
        started.append(program)
        return program

    yield start
    for program in started:
        program.close()


def call_all(controller: Program, pid: int) -> list[int]:
    """The results of every call that needs permission, in an order in which each is legal."""
    return [
        controller.get_state(pid)[0],
        controller.lock(pid),
        controller.checkpoint(pid),
        controller.restore(pid),
        controller.unlock(pid),
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("capabilities", "permitted"),
    [
        pytest.param((), {NOBODY}, marks=pytest.mark.long),
        (("sys_ptrace",), {NOBODY}),
        pytest.param(("dac_override",), {NOBODY}, marks=pytest.mark.long),
        pytest.param(("sys_ptrace", "dac_read_search"), {NOBODY}, marks=pytest.mark.long),
        pytest.param(("sys_ptrace", "kill", "setuid", "setgid", "chown"), {NOBODY}, marks=pytest.mark.long),
        (("sys_ptrace", "dac_override"), {NOBODY, DAEMON, ROOT}),
    ],
)
def test_a_call_needs_ptrace_access_and_the_pipe_of_the_target(
    start_as: StartAs, capabilities: tuple[str, ...], permitted: set[int]
) -> None:
    controller, judge = start_as(NOBODY, *capabilities), start_as(ROOT)
    assert controller.init() == SUCCESS
    for uid in (NOBODY, DAEMON, ROOT):
        target = start_as(uid)
        target.set_up()
        expected = SUCCESS if uid in permitted else OPERATING_SYSTEM
        assert call_all(controller, target.pid) == [expected] * 5, uid
        assert judge.get_state(target.pid) == [SUCCESS, RUNNING]


@pytest.mark.parametrize(
    ("capabilities", "expected"), [(("setuid", "sys_ptrace"), SUCCESS), (("setuid",), OPERATING_SYSTEM)]
)
def test_the_pipe_is_opened_with_the_file_system_user_of_the_calling_thread(
    start_as: StartAs, capabilities: tuple[str, ...], expected: int
) -> None:
    """With CAP_SYS_PTRACE, setfsuid to the user of the target is enough."""
    controller, target = start_as(NOBODY, *capabilities), start_as(DAEMON)
    target.set_up()
    controller.init()
    controller.set_file_system_user(DAEMON)
    assert call_all(controller, target.pid) == [expected] * 5


def test_the_pipe_belongs_to_the_file_system_user_at_the_time_of_cuinit(start_as: StartAs) -> None:
    target, controller = start_as(ROOT), start_as(NOBODY, "sys_ptrace", "dac_read_search")
    target.set_file_system_user(NOBODY)
    target.set_up()
    target.set_file_system_user(ROOT)
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]


def test_the_restore_thread_and_a_process_without_cuda_are_told_to_everybody(start_as: StartAs) -> None:
    controller, target = start_as(NOBODY), start_as(ROOT)
    target.set_up()
    error, tid = controller.restore_thread_id(target.pid)
    assert error == SUCCESS
    assert f"{tid}" in os.listdir(f"/proc/{target.pid}/task")
    for pid in (1, os.getpid()):
        assert controller.get_state(pid)[0] == NOT_INITIALIZED
        assert controller.restore_thread_id(pid)[0] == NOT_INITIALIZED
        assert controller.lock(pid) == NOT_INITIALIZED


def test_a_target_without_its_pipe_can_not_be_called(start_as: StartAs) -> None:
    """A daemon that closes all its files."""
    controller, target = start_as(ROOT), start_as(ROOT)
    before = set(os.listdir(f"/proc/{target.pid}/fd"))
    target.set_up()
    pipes = [
        int(number)
        for number in set(os.listdir(f"/proc/{target.pid}/fd")) - before
        if os.readlink(f"/proc/{target.pid}/fd/{number}").startswith("pipe:")
    ]
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]
    target.close_files(pipes)
    assert controller.get_state(target.pid)[0] == OPERATING_SYSTEM
