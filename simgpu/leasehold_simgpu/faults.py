"""The faults of a simulated host: a table in its state file that every driver call searches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, final

from leasehold_simgpu import layout
from leasehold_simgpu.errors import InvalidSettingError
from leasehold_simgpu.records import Fault
from leasehold_simgpu.state_file import StateFile

CALL_OF_ACTION: Final[Mapping[str, str]] = {
    "get_state": "cuCheckpointProcessGetState",
    "get_restore_thread_id": "cuCheckpointProcessGetRestoreThreadId",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
"""Short names of the checkpoint calls."""

_LONGEST_NAME: Final = 55


@final
class FaultTable:
    """Sets, lists and clears faults. Safe while driver calls use the table."""

    def __init__(self, file: StateFile) -> None:
        self._file = file

    def set(self, fault: Fault) -> Fault:
        """Sets a fault and returns it with its id.

        Raises:
            InvalidSettingError: A value is out of range, or the table is full.
        """
        _validate(fault)
        with self._file.locked() as host:
            slot = _free_slot(host)
            fault_id: int = host.next_fault_id
            host.next_fault_id += 1
            host.faults[slot] = layout.Fault(
                call=CALL_OF_ACTION.get(fault.call, fault.call).encode(),
                pid=fault.pid or 0,
                error=fault.error,
                delay_ms=round(fault.delay_s * 1000),
                hang=fault.hang,
                signal=fault.signal,
                signal_delay_ms=round(fault.signal_delay_s * 1000),
                state=layout.NO_STATE if fault.state is None else fault.state,
                skip=fault.skip,
                keep_memory=fault.keep_memory,
                ignore_gpu_pairs=fault.ignore_gpu_pairs,
                remaining=layout.UNLIMITED if fault.times is None else fault.times,
                after=fault.after,
            )
            host.faults[slot].id = fault_id  # written last: the fault is active from here on
            _count(host)
        return dataclasses.replace(fault, id=fault_id)

    def list(self) -> tuple[Fault, ...]:
        """The active faults, oldest first."""
        with self._file.locked() as host:
            found = [_read(record) for record in host.faults if record.id != 0 and record.remaining != 0]
        return tuple(sorted(found, key=lambda fault: fault.id))

    def clear(self, fault_id: int | None, call: str | None, pid: int | None) -> int:
        """Clears the faults that match all given values, and returns how many. Hanging calls continue."""
        name = None if call is None else CALL_OF_ACTION.get(call, call)
        cleared = 0
        with self._file.locked() as host:
            for slot, record in enumerate(host.faults):
                matches = fault_id in (None, record.id) and pid in (None, record.pid)
                if record.id != 0 and matches and name in (None, record.call.decode()):
                    host.faults[slot] = layout.Fault()
                    cleared += 1
            _count(host)
        return cleared


def _validate(fault: Fault) -> None:
    name = CALL_OF_ACTION.get(fault.call, fault.call)
    if not name.startswith(("cu", "nvml")) or len(name) > _LONGEST_NAME:
        short = ", ".join(CALL_OF_ACTION)
        raise InvalidSettingError(
            f"call {fault.call!r} is not a driver function: name one such as cuMemAlloc, or {short}"
        )
    if fault.times is not None and not 0 < fault.times < 2**31:
        raise InvalidSettingError(f"times {fault.times} is not positive: leave it out for every call")
    if not 0 <= fault.after < 2**31:
        raise InvalidSettingError(f"after {fault.after} calls is out of range: choose 0 or more")
    if not 0 <= fault.delay_s < 2**31 / 1000:
        raise InvalidSettingError(f"delay of {fault.delay_s} s is out of range: choose 0 or more seconds")
    if not 0 <= fault.signal_delay_s < 2**31 / 1000:
        raise InvalidSettingError(
            f"signal delay of {fault.signal_delay_s} s is out of range: choose 0 or more seconds"
        )
    if fault.signal_delay_s and (not fault.signal or name not in CALL_OF_ACTION.values()):
        short = ", ".join(CALL_OF_ACTION)
        raise InvalidSettingError(f"a signal delay needs a signal and a call with a target: {short}")
    if fault.state is not None and not 0 <= fault.state <= layout.STATE_MASK:
        raise InvalidSettingError(
            f"process state {fault.state} is out of range: choose 0 to {layout.STATE_MASK}"
        )


def _free_slot(host: layout.Host) -> int:
    free = [slot for slot, record in enumerate(host.faults) if record.id == 0]
    used_up = [slot for slot, record in enumerate(host.faults) if record.remaining == 0 and not record.hang]
    if not free and not used_up:
        raise InvalidSettingError(f"{layout.MAX_FAULTS} faults are set, which is the limit: clear some")
    return (free or used_up)[0]


def _count(host: layout.Host) -> None:
    host.fault_count = sum(record.id != 0 for record in host.faults)


def _read(record: layout.Fault) -> Fault:
    return Fault(
        call=record.call.decode(),
        pid=record.pid or None,
        error=record.error,
        delay_s=record.delay_ms / 1000,
        hang=bool(record.hang),
        signal=record.signal,
        signal_delay_s=record.signal_delay_ms / 1000,
        state=None if record.state == layout.NO_STATE else record.state,
        skip=bool(record.skip),
        keep_memory=bool(record.keep_memory),
        ignore_gpu_pairs=bool(record.ignore_gpu_pairs),
        after=record.after,
        times=None if record.remaining == layout.UNLIMITED else record.remaining,
        id=record.id,
    )
