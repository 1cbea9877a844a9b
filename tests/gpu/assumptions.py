"""One probe for each assumption of the simulated driver that docs/driver.md numbers under "What it assumes".

`python -m tests.gpu.assumptions N` runs probe N, and prints a JSON object: the answer is `yes`, `no` or
`not tested`, with what was seen. Each probe has CUDA processes of its own, and does nothing that was seen to
hang a GPU or a host: no GPU is lost or switched to MIG, and no daemon of MPS is started. A process that a
probe wedges or that the kernel kills is the probe's own, and has nothing on a GPU then.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import pynvml

from tests.gpu.machine import memory_gib
from tests.gpu.stand import (
    BUFFER_BYTES,
    GIB,
    LEAST_COPY_S,
    LOCK_TIMEOUT_MS,
    LONG_COPY_BYTES,
    MOVES_CUDA_VERSION,
    SEED,
    ContradictionError,
    NotTestedError,
    Stand,
    blocks,
    cuda_version,
    expect,
    inventory,
    need,
    need_moves,
    rotation,
    stand,
)
from tests.gpu.target_probes import (
    attached_profiler,
    frozen_target,
    importer_of_memory,
    killed_controller,
    limited_target,
    permission,
    restore_without_memory,
)
from tests.simgpu.programs import (
    CHECKPOINTED,
    INVALID_DEVICE,
    INVALID_VALUE,
    LOCKED,
    NO_DEVICE,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    RUNNING,
    SUCCESS,
    wait_until,
)

Probe = Callable[[Stand], str]
ATTACH_GLOBAL: Final = 1


def errors_of_pids(stand: Stand) -> str:
    """1: error 304 for a missing pid, 3 for a zombie and for a live process without CUDA."""
    controller = stand.controller()
    gone = subprocess.Popen(["true"])
    gone.wait()
    zombie, live = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "600"])
    try:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        for name, pid, error in (
            ("a missing pid", gone.pid, OPERATING_SYSTEM),
            ("a zombie", zombie.pid, NOT_INITIALIZED),
            ("a live process without CUDA", live.pid, NOT_INITIALIZED),
        ):
            results = [getattr(controller, call)(pid) for call in ("lock", "checkpoint", "restore", "unlock")]
            results += [controller.get_state(pid)[0], controller.restore_thread_id(pid)[0]]
            expect(f"all calls on {name}", results, [error] * 6)
    finally:
        for child in (zombie, live):
            child.kill()
            child.wait()
    return "missing 304, zombie 3, without CUDA 3, by every call"


def pairs_of_a_map(stand: Stand) -> str:
    """2: a map names every GPU of the host once and no other, from where the process is now."""
    if cuda_version() < MOVES_CUDA_VERSION:
        raise NotTestedError("it needs driver 580")
    gpus = sorted(inventory(), key=lambda gpu: gpu.free_bytes, reverse=True)
    unknown = "GPU-00000000-0000-0000-0000-000000000001"
    same = [[gpu.uuid, gpu.uuid] for gpu in gpus]
    wrong = {
        "a map to an unknown GPU": [[gpus[0].uuid, unknown], *same[1:]],
        "a map from an unknown GPU": [[unknown, gpus[0].uuid], *same[1:]],
        "a map with a pair twice": [same[0], *same],
        "a map with an unknown pair more": [*same, [unknown, unknown]],
    }
    if len(gpus) > 1:
        wrong["a map of the visible GPU alone"] = same[:1]
        wrong["a map to one GPU twice"] = [[gpu.uuid, gpus[0].uuid] for gpu in gpus]
    controller = stand.controller()
    target = stand.target(CUDA_VISIBLE_DEVICES=gpus[0].uuid)
    expect("GPUs that the masked process sees", target.program.device_uuids(), [gpus[0].uuid])
    target.suspend(controller)
    for name, pairs in wrong.items():
        expect(name, controller.restore(target.pid, pairs), INVALID_VALUE)
        expect("the state after it", controller.get_state(target.pid), [SUCCESS, CHECKPOINTED])
    seen = f"{len(wrong)} wrong maps answer 1 and leave it CHECKPOINTED"
    try:
        gpus = need_moves(2)
    except NotTestedError as error:
        target.resume(controller, same)
        return f"{seen}; not moved: {error}"
    turn = rotation(gpus)
    for number in range(2):
        target.resume(controller, turn)
        (before,) = (pair for pair in turn if pair[0] == gpus[number % len(gpus)].uuid)
        expect("the GPU after a rotation", target.program.device_uuids(), before[1:])
        target.suspend(controller)
    target.resume(controller)
    return f"{seen}; it moves by {len(gpus)} pairs, twice"


def restore_without_init(stand: Stand) -> str:
    """3: without cuInit and persistence mode a restore answers 3, before the map is looked at."""
    gpus = inventory()
    if any(gpu.persistence for gpu in gpus):
        raise NotTestedError("persistence mode is on")
    controller, uninitialized = stand.controller(), stand.controller(initialized=False)
    target = stand.target()
    target.suspend(controller)
    nobody = "GPU-00000000-0000-0000-0000-000000000000"
    error = uninitialized.restore(target.pid, [[nobody, nobody]])
    expect("the state after it", controller.get_state(target.pid), [SUCCESS, CHECKPOINTED])
    target.resume(controller)
    expect("a restore with a wrong map, without cuInit", error, NOT_INITIALIZED)
    return "a wrong map without cuInit answers 3"


def listed_processes(stand: Stand) -> str:
    """4: NVML lists LOCKED processes, and only those with a context."""
    controller = stand.controller()
    target = stand.target()
    listed = {pid for found in controller.nvml_processes().values() for pid in found}
    if str(target.pid) not in listed:
        raise NotTestedError("NVML does not list processes by the pids that are seen here")
    expect("a process without a context is listed", str(controller.pid) in listed, False)
    target.lock(controller)
    listed = {pid for found in controller.nvml_processes().values() for pid in found}
    target.unlock(controller)
    expect("a LOCKED process is listed", str(target.pid) in listed, True)
    return "a LOCKED process is listed, one with cuInit alone is not"


def calls_of_a_locked_process(stand: Stand) -> str:
    """5: while a process is locked, calls that allocate or copy block, and device queries answer."""
    controller = stand.controller()
    target = stand.target()
    found = {}
    for name, *arguments in (
        ("device_uuids",),
        ("memory_info",),
        ("allocate", 4096),
        ("holds", target.address, 4096, 7),
    ):
        target.lock(controller)
        found[name] = blocks(target.program, str(name), *arguments)
        target.unlock(controller)
        if found[name]:
            target.program.answer()
    seen = ", ".join(f"{name} {'blocks' if waits else 'answers'}" for name, waits in found.items())
    if found != {"device_uuids": False, "memory_info": found["memory_info"], "allocate": True, "holds": True}:
        raise ContradictionError(seen)
    return f"{seen}; launches are not tested"


def calls_on_one_target(stand: Stand) -> str:
    """6: calls on one target are served one at a time; a stopped target blocks all."""
    available = int((memory_gib("MemAvailable") or 0) * GIB)
    first, second = stand.controller(), stand.controller()
    target = stand.target(min(LONG_COPY_BYTES, available // 4))
    target.lock(first)
    began = time.monotonic()
    first.begin("checkpoint", target.pid)
    wait_until(first.is_asleep, "the checkpoint has begun")
    second.begin("get_state", target.pid)
    _, state = second.answer()
    at_once = first.is_waiting()
    need("checkpoint", first.answer())
    checkpoint_s = time.monotonic() - began
    target.resume(first)
    target.program.stop()
    try:
        stopped_blocks = blocks(second, "get_state", target.pid)
    finally:
        target.program.send_signal(signal.SIGCONT)
    if stopped_blocks:
        second.answer()
    expect("a state query of a stopped target blocks", stopped_blocks, True)
    if at_once:
        raise ContradictionError(
            f"a state query answers {state} while a checkpoint of {checkpoint_s:.1f} s runs"
        )
    if checkpoint_s < LEAST_COPY_S:
        raise NotTestedError(
            f"a stopped target blocks, but a checkpoint took {checkpoint_s:.1f} s: too short to tell"
        )
    return f"a state query waits for a checkpoint of {checkpoint_s:.1f} s, and for a stopped target"


def bus_id_after_a_move(stand: Stand) -> str:
    """8: after a move the PCI bus id is the new one."""
    gpus = need_moves(1)
    controller = stand.controller()
    target = stand.target(CUDA_VISIBLE_DEVICES=gpus[0].uuid)
    target.suspend(controller)
    target.resume(controller, rotation(gpus))
    expect("the GPU after a move", target.program.device_uuids(), [gpus[1].uuid])
    _, seen = target.program.call("cuDeviceGetPCIBusId", 13, 0)
    bus_ids = {gpu.bus_id[-12:].lower(): gpu.index for gpu in gpus}
    index = next((index for bus_id, index in bus_ids.items() if bus_id in seen.lower()), None)
    expect(f"the GPU whose PCI bus id is read after a move to {gpus[1].index}", index, gpus[1].index)
    return "the process reads the bus id of its new GPU"


def lost_gpu(_stand: Stand) -> str:
    """9: a lost GPU answers UNKNOWN; with MIG on, a checkpoint answers OUT_OF_MEMORY."""
    raise NotTestedError("no GPU is lost or switched to MIG for a report")


def arguments_and_masks(stand: Stand) -> str:
    """10: reserved words that are not zero answer 1; a GPU that is visible twice answers 101."""
    controller = stand.controller()
    target = stand.target()
    error = controller.lock_with_reserved_word(target.pid, LOCK_TIMEOUT_MS)
    _, state = controller.get_state(target.pid)
    if state == LOCKED:
        target.unlock(controller)
    seen = f"a reserved word answers {error}, state {state}"
    if (error, state) != (INVALID_VALUE, RUNNING):
        raise ContradictionError(seen)
    uuid = controller.device_uuids()[0]
    for mask, expected in (
        ("0,0", INVALID_DEVICE),
        (f"{uuid},{uuid}", INVALID_DEVICE),
        (",0", NO_DEVICE),
        ("-1,0", NO_DEVICE),
        ("0,,0", SUCCESS),
        (f"0,{uuid}", SUCCESS),
        ("0x1", SUCCESS),
    ):
        masked = stand.controller(initialized=False, CUDA_VISIBLE_DEVICES=mask)
        expect(f"cuInit with CUDA_VISIBLE_DEVICES={mask}", masked.init(), expected)
        if expected == SUCCESS:
            expect(f"GPUs with CUDA_VISIBLE_DEVICES={mask}", len(masked.device_uuids()), 1)
        masked.close()
    return f"{seen}; 7 values of CUDA_VISIBLE_DEVICES have the assumed results"


def client_of_mps(_stand: Stand) -> str:
    """11: a client of MPS is in both lists; its lock works, its checkpoint answers 801."""
    raise NotTestedError("no daemon of MPS is started for a report")


def minor_numbers(_stand: Stand) -> str:
    """12: an NVML minor number is the NVML index."""
    minors = [gpu.minor for gpu in inventory()]
    expect("minor numbers by index", minors, list(range(len(minors))))
    return f"minor numbers {minors}"


def xid_events(_stand: Stand) -> str:
    """13: a process gets the Xids that come after its registration."""
    pynvml.nvmlInit()
    events = pynvml.nvmlEventSetCreate()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        try:
            event = pynvml.nvmlEventSetWait_v2(events, 200)
            seen = f"an Xid came: {event.eventData}"
        except pynvml.NVMLError as error:
            seen = f"the wait answers {error}"
    except pynvml.NVMLError as error:
        seen = f"the registration answers {error}"
    finally:
        pynvml.nvmlEventSetFree(events)
    raise NotTestedError(f"no fault is made for a report; {seen}")


def refused_checkpoint(stand: Stand) -> str:
    """14: a refused checkpoint leaves its target LOCKED."""
    controller = stand.controller()
    target = stand.target()
    error, _ = target.program.call("cuMemAllocManaged", 4096, ATTACH_GLOBAL)
    if error != SUCCESS:
        raise NotTestedError(f"managed memory, which no driver can checkpoint, answers {error}")
    target.lock(controller)
    refused = controller.checkpoint(target.pid)
    _, state = controller.get_state(target.pid)
    unlocked = controller.unlock(target.pid)
    target.program.kill()  # it was never restored, and may be in no good state
    if refused == SUCCESS:
        raise NotTestedError("a process with managed memory is checkpointed")
    seen = (
        f"with managed memory, checkpoint answers {refused}, the state is {state}, unlock answers {unlocked}"
    )
    if (state, unlocked) != (LOCKED, SUCCESS):
        raise ContradictionError(seen)
    return seen


def peers(_stand: Stand) -> str:
    """15: peers hold up calls on each other while one is locked."""
    raise NotTestedError("peers need NCCL or CUDA IPC, which a report does not set up")


def versions(stand: Stand) -> str:
    """16: pairs before driver 580 answer 801, a pool gives 0 for 0 bytes, a branch is named like r580_00.

    The name does not follow from the driver's number: 580.159.04 says r582_49.
    """
    controller = stand.controller()
    target = stand.target()
    error, address = target.program.call("cuMemAllocAsync", 0, 0)
    branch = str(pynvml.nvmlSystemGetDriverBranch().branch)
    seen = f"a pool answers {error} with {address} for 0 bytes, the branch is {branch}"
    if cuda_version() < MOVES_CUDA_VERSION:
        target.suspend(controller)
        identity = [[gpu.uuid, gpu.uuid] for gpu in inventory()]
        refused = controller.restore(target.pid, identity)
        target.resume(controller)
        expect("pairs", refused, NOT_SUPPORTED)
        seen += ", pairs answer 801"
    if (
        error != SUCCESS
        or not re.fullmatch(r"\D*0(x0+)?\D*", address)
        or not re.fullmatch(r"r\d+_\d+", branch)
    ):
        raise ContradictionError(seen)
    return seen


def target_that_dies(_stand: Stand) -> str:
    """17: a target that dies some seconds after a call answers 304 to every call until then."""
    raise NotTestedError("no process is made to crash in a call of the driver for a report")


def memory_of_another(stand: Stand) -> str:
    """19: a process never reads what another process left in device memory."""
    writer, reader = stand.target(), stand.controller()
    reader.set_up()
    need("free", writer.program.free(writer.address))
    error, address = reader.allocate(BUFFER_BYTES)
    need("allocation", error)
    if reader.holds(address, BUFFER_BYTES, SEED):
        raise ContradictionError("a new allocation holds what an earlier one of another process held")
    return "a new allocation of the same size holds other bytes"


PROBES: Final[dict[int, Probe]] = {
    1: errors_of_pids,
    2: pairs_of_a_map,
    3: restore_without_init,
    4: listed_processes,
    5: calls_of_a_locked_process,
    6: calls_on_one_target,
    7: killed_controller,
    8: bus_id_after_a_move,
    9: lost_gpu,
    10: arguments_and_masks,
    11: client_of_mps,
    12: minor_numbers,
    13: xid_events,
    14: refused_checkpoint,
    15: peers,
    16: versions,
    17: target_that_dies,
    18: limited_target,
    19: memory_of_another,
    20: permission,
    21: frozen_target,
    22: attached_profiler,
    23: restore_without_memory,
    24: importer_of_memory,
}

ALONE: Final = frozenset({2, 6, 7, 8, 23})
"""Probes that measure time, sort GPUs by their free memory, or take all of it: none runs beside them."""


def answer(probe: Probe) -> dict[str, str]:
    """Runs a probe."""
    try:
        with stand() as made:
            return {"answer": "yes", "seen": probe(made)}
    except ContradictionError as error:
        return {"answer": "no", "seen": str(error)}
    except (NotTestedError, pynvml.NVMLError) as error:
        return {"answer": "not tested", "seen": str(error)}


if __name__ == "__main__":
    print(json.dumps(answer(PROBES[int(sys.argv[1])])))
