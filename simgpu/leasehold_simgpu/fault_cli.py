"""`leasehold simgpu fault`: faults of the simulated driver from the command line."""

from __future__ import annotations

from pathlib import Path

import click

from leasehold_simgpu.cli_types import SignalType, directory_option
from leasehold_simgpu.host import SimulatedHost
from leasehold_simgpu.records import ProcessState


@click.group("fault")
def fault_group() -> None:
    """Make driver calls fail."""


@fault_group.command("set")
@directory_option
@click.option(
    "--pid", type=int, help="Only for this process: the target of a checkpoint call, else the caller."
)
@click.option("--error", type=click.IntRange(0, 9999), default=0, help="The number that the call returns.")
@click.option("--delay-s", type=click.FloatRange(min=0), default=0.0, help="Seconds to wait first.")
@click.option("--hang", is_flag=True, help="Return only when the fault is cleared.")
@click.option("--signal", "signal_", type=SignalType(), help="Signal to send to the process, such as KILL.")
@click.option(
    "--signal-delay-s",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds from the return of the call to the signal.",
)
@click.option(
    "--state",
    type=click.Choice([state.name.lower() for state in ProcessState]),
    help="State of the process afterwards.",
)
@click.option("--skip", is_flag=True, help="Succeed without effect (or return --error).")
@click.option("--keep-memory", is_flag=True, help="Let a checkpoint leave the memory on the GPU.")
@click.option("--ignore-gpu-pairs", is_flag=True, help="Let a restore stay on the old GPUs.")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    default=0,
    help="Number of normal calls before the fault. Default: none.",
)
@click.option(
    "--times", type=click.IntRange(min=1), help="Number of calls with the fault. Default: until cleared."
)
@click.argument("call")
def fault_set(
    directory: Path,
    pid: int | None,
    error: int,
    delay_s: float,
    hang: bool,
    signal_: int | None,
    signal_delay_s: float,
    state: str | None,
    skip: bool,
    keep_memory: bool,
    ignore_gpu_pairs: bool,
    after: int,
    times: int | None,
    call: str,
) -> None:
    """Set a fault on CALL and print its id.

    CALL is a function of libcuda or NVML without version suffix (cuMemAlloc, nvmlDeviceGetCount), or one of
    lock, checkpoint, restore, unlock, get_state, get_restore_thread_id.
    """
    fault = SimulatedHost.open(directory).set_fault(
        call,
        pid,
        error=error,
        delay_s=delay_s,
        hang=hang,
        signal=signal_ or 0,
        signal_delay_s=signal_delay_s,
        state=None if state is None else ProcessState[state.upper()],
        skip=skip,
        keep_memory=keep_memory,
        ignore_gpu_pairs=ignore_gpu_pairs,
        after=after,
        times=times,
    )
    click.echo(fault.id)


@fault_group.command("clear")
@directory_option
@click.option("--id", "fault_id", type=int, help="The number that `fault set` printed.")
@click.option("--call", help="Only faults of this call.")
@click.option("--pid", type=int, help="Only faults of this process.")
def fault_clear(directory: Path, fault_id: int | None, call: str | None, pid: int | None) -> None:
    """Clear all faults, or those that match the options, and print how many. Hanging calls continue."""
    click.echo(SimulatedHost.open(directory).clear_faults(fault_id=fault_id, call=call, pid=pid))
