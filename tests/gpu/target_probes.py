"""Probes of killed and unprivileged callers, and of limited, frozen, profiled and wedged targets."""

from __future__ import annotations

import os
import signal
import time
from typing import Final

from tests.gpu.contents_program import PROFILER
from tests.gpu.machine import memory_gib
from tests.gpu.stand import (
    BUFFER_BYTES,
    GIB,
    LEAST_COPY_S,
    LOCK_TIMEOUT_MS,
    LONG_COPY_BYTES,
    SEED,
    ContradictionError,
    NotTestedError,
    Stand,
    Target,
    blocks,
    expect,
    need,
)
from tests.gpu.torch_contents import START_S, Holder
from tests.gpu.torch_policies import python_with_torch
from tests.simgpu.control_groups import ControlGroup, Controller, NoControlGroupError
from tests.simgpu.programs import (
    CHECKPOINTED,
    ILLEGAL_STATE,
    INVALID_VALUE,
    LOCKED,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    RUNNING,
    SUCCESS,
    wait_until,
)

KILL_AFTER_S: Final = 0.1
WAITED_S: Final = 0.2
"""A query that took so long has waited for the copy: others take a few milliseconds."""

WEDGED_BYTES: Final = 2 * GIB
SMALL_LIMIT_BYTES: Final = 8 * 2**20
"""Less than the buffer of a target."""

NOBODY: Final = 65534


def kill_in(stand: Stand, call: str, target: Target) -> float:
    """Kills the caller of a call, and returns how long the next state query took.

    Raises:
        ContradictionError: The target did not finish the call.
    """
    killed, next_one = stand.controller(), stand.controller()
    killed.begin(call, target.pid)
    wait_until(killed.is_asleep, f"the {call} has begun")
    time.sleep(KILL_AFTER_S)
    killed.kill()
    began = time.monotonic()
    state = next_one.get_state(target.pid)
    finished = {"checkpoint": CHECKPOINTED, "restore": LOCKED}[call]
    expect(f"the state after a {call} whose caller was killed", state, [SUCCESS, finished])
    return time.monotonic() - began


def killed_controller(stand: Stand) -> str:
    """7: the target finishes a call whose caller is killed, and the next call waits until then."""
    available = int((memory_gib("MemAvailable") or 0) * GIB)
    controller = stand.controller()
    target = stand.target(min(LONG_COPY_BYTES, available // 4))
    target.lock(controller)
    began = time.monotonic()
    need("checkpoint", controller.checkpoint(target.pid))
    checkpoint_s = time.monotonic() - began
    target.resume(controller)
    if checkpoint_s < LEAST_COPY_S:
        raise NotTestedError(f"a checkpoint took {checkpoint_s:.1f} s: too short to tell")
    target.lock(controller)
    after_checkpoint_s = kill_in(stand, "checkpoint", target)
    after_restore_s = kill_in(stand, "restore", target)
    target.unlock(controller)
    expect("the buffer", target.holds(), True)
    seen = (
        f"state queries after a killed caller took {after_checkpoint_s:.1f} s (CHECKPOINTED) "
        f"and {after_restore_s:.1f} s (LOCKED), data intact"
    )
    if after_checkpoint_s < WAITED_S:
        raise ContradictionError(f"{seen}; a whole checkpoint takes {checkpoint_s:.1f} s")
    return seen


def control_group(controller: Controller) -> ControlGroup:
    """A control group, or the reason why the probe needs one."""
    try:
        return ControlGroup(controller)
    except NoControlGroupError as error:
        raise NotTestedError(str(error)) from error


def limited_target(stand: Stand) -> str:
    """18: a checkpoint beyond the limit of a control group ends the target, and answers 304."""
    group = control_group("memory")
    try:
        controller = stand.controller()
        target = stand.target()
        target.lock(controller)
        group.add(target.pid)
        group.limit_memory(SMALL_LIMIT_BYTES)
        error = controller.checkpoint(target.pid)
        if error == SUCCESS:
            target.resume(controller)
            raise NotTestedError("the limit of the control group does not limit the copy")
        expect("a checkpoint beyond the limit", error, OPERATING_SYSTEM)
        expect("the end of the target", target.program.wait(), -signal.SIGKILL)
    finally:
        group.close()
    return "the target ends by SIGKILL, the checkpoint answers 304; a host without memory is not tested"


def permission(stand: Stand) -> str:
    """20: a call needs ptrace access and a pipe of the target; the thread id needs neither."""
    if os.geteuid() != 0:
        raise NotTestedError("only root can start callers of another user")
    target = stand.target()
    found = {}
    for name, capabilities, user in (
        ("no capability", (), NOBODY),
        ("CAP_SYS_PTRACE", ("sys_ptrace",), NOBODY),
        ("CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH", ("sys_ptrace", "dac_read_search"), NOBODY),
        ("CAP_DAC_OVERRIDE", ("dac_override",), NOBODY),
        ("CAP_SYS_PTRACE and CAP_DAC_OVERRIDE", ("sys_ptrace", "dac_override"), NOBODY),
        ("CAP_SYS_PTRACE and the target's fsuid", ("sys_ptrace", "setuid"), 0),
    ):
        caller = stand.controller()
        need("a query of the caller about itself", caller.get_state(caller.pid)[0])  # loads what it needs
        caller.become(NOBODY, *capabilities)
        caller.set_file_system_user(user)
        expect(f"a query for the thread id with {name}", caller.restore_thread_id(target.pid)[0], SUCCESS)
        errors = [caller.get_state(target.pid)[0], caller.lock(target.pid, LOCK_TIMEOUT_MS)]
        if errors[1] == SUCCESS:
            errors.append(caller.unlock(target.pid))
        expect(f"calls with {name} have one result", len(set(errors)), 1)
        found[name] = errors[0]
    seen = ", ".join(f"{name} {error}" for name, error in found.items())
    if list(found.values()) != [*[OPERATING_SYSTEM] * 4, SUCCESS, SUCCESS]:
        raise ContradictionError(seen)
    return f"{seen}; the thread id is told to everybody"


def frozen_target(stand: Stand) -> str:
    """21: a target that its control group has frozen blocks calls until it is thawed."""
    group = control_group("freezer")
    try:
        controller = stand.controller()
        target = stand.target()
        group.freeze(target.pid)
        try:
            waits = blocks(controller, "get_state", target.pid)
        finally:
            group.thaw()
        if waits:
            expect("the answer after it is thawed", controller.answer(), [SUCCESS, RUNNING])
        expect("a state query of a frozen target blocks", waits, True)
    finally:
        group.close()
    return "a state query of a frozen target blocks, and is answered once it is thawed"


def attached_profiler(stand: Stand) -> str:
    """22: a process with an attached profiler can't be locked: 801 at once, and it is still RUNNING."""
    python = python_with_torch()
    if python is None:
        raise NotTestedError("it needs a Python with PyTorch that sees a GPU")
    controller = stand.controller()
    holder = Holder(python, PROFILER)
    try:
        if holder.read(START_S) != "ready":
            raise NotTestedError("torch.profiler does not start here")
        began = time.monotonic()
        refused = controller.lock(holder.pid, LOCK_TIMEOUT_MS)
        lock_s = time.monotonic() - began
        state = controller.get_state(holder.pid)
        unlocked = controller.unlock(holder.pid)
        expect("a lock with a profiler", refused, NOT_SUPPORTED)
        expect("the state after it", state, [SUCCESS, RUNNING])
        expect("an unlock after it", unlocked, ILLEGAL_STATE)
        expect("its contents are whole", holder.works(), True)
    finally:
        holder.end()
    return f"the lock answers 801 after {lock_s:.2f} s, the process is RUNNING and computes on"


def restore_without_memory(stand: Stand) -> str:
    """23: a restore without device memory answers 2 at once, and wedges the process."""
    controller = stand.controller()
    target = stand.target(WEDGED_BYTES)
    target.suspend(controller)
    hog = stand.hog(target.size_bytes // 4)
    began = time.monotonic()
    error = controller.restore(target.pid)
    restore_s = time.monotonic() - began
    if error == SUCCESS:
        target.unlock(controller)
        raise NotTestedError("another process could not take the memory of the target")
    expect("a restore without memory", error, OUT_OF_MEMORY)
    hog.close()
    expect("the state after it", controller.get_state(target.pid), [SUCCESS, CHECKPOINTED])
    expect("a restore with memory after it", controller.restore(target.pid), OPERATING_SYSTEM)
    expect("an unlock after it", controller.unlock(target.pid), ILLEGAL_STATE)
    expect("the state at the end", controller.get_state(target.pid), [SUCCESS, CHECKPOINTED])
    target.program.kill()  # nothing of it is on the GPU
    return f"2 after {restore_s:.2f} s; then CHECKPOINTED, restore 304, unlock 401"


def importer_of_memory(stand: Stand) -> str:
    """24: a restore of a process that has imported CUDA IPC memory answers 1, and wedges the process."""
    controller = stand.controller()
    exporter, importer = stand.target(), stand.target()
    address = importer.program.import_memory(exporter.program.export_memory(exporter.address))
    expect("the imported memory", importer.program.holds(address, BUFFER_BYTES, SEED), True)
    importer.suspend(controller)
    exporter.suspend(controller)
    exporter.resume(controller)
    refused = controller.restore(importer.pid)
    if refused == SUCCESS:
        importer.unlock(controller)
    expect("a restore with imported memory", refused, INVALID_VALUE)
    expect("a second one", controller.restore(importer.pid), OPERATING_SYSTEM)
    expect("an unlock after it", controller.unlock(importer.pid), ILLEGAL_STATE)
    expect("the state at the end", controller.get_state(importer.pid), [SUCCESS, CHECKPOINTED])
    importer.program.kill()  # nothing of it is on the GPU
    return "the exporter is restored; the importer answers 1, then CHECKPOINTED, restore 304, unlock 401"
