"""`leasehold simgpu`: simulated GPU hosts from the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from leasehold_simgpu.chips import CHIPS
from leasehold_simgpu.cli_types import DirectoryType, SizeType, ThrottleReasonType, directory_option
from leasehold_simgpu.errors import InvalidSettingError, SimgpuError
from leasehold_simgpu.fault_cli import fault_group
from leasehold_simgpu.faults import CALL_OF_ACTION
from leasehold_simgpu.host import SimulatedHost
from leasehold_simgpu.libraries import build
from leasehold_simgpu.new_host import DEFAULT_DRIVER_VERSION
from leasehold_simgpu.pass_through import run_with_signals
from leasehold_simgpu.records import Fault
from leasehold_simgpu.timing import Timing


class _BadUsage(click.ClickException):
    """An invalid option or argument: exit status 2."""

    exit_code = 2


class SimgpuGroup(click.Group):
    """Prints errors of this package as one line. Exits with 2 for an invalid setting, otherwise with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except InvalidSettingError as error:
            raise _BadUsage(str(error)) from error
        except SimgpuError as error:
            raise click.ClickException(str(error)) from error


EPILOG: Final = """\b
Examples:
  leasehold simgpu exec --gpus 2 --dir host -- leasehold worker --name alpha
  leasehold simgpu show --dir host
  leasehold simgpu gpu --dir host --lost 1
"""


@click.group(cls=SimgpuGroup, name="simgpu", epilog=EPILOG)
def command() -> None:
    """Simulated GPU hosts: run CUDA programs and the worker on a machine without a GPU."""


@command.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("--gpus", default=4, show_default=True, metavar="N", help="Number of GPUs, 1 to 16.")
@click.option(
    "--chip", default="H100", show_default=True, help=f"One, or one for each GPU: {', '.join(CHIPS)}."
)
@click.option("--memory", type=SizeType(), help="Memory of each GPU, such as 80GiB. Default: the chip's.")
@click.option("--instant", is_flag=True, help="Checkpoints and restores take no time.")
@click.option("--suspend-gbps", type=click.FloatRange(min=0), help="GB/s from GPU to host. Default: 2.")
@click.option("--restore-gbps", type=click.FloatRange(min=0), help="GB/s from host to GPU. Default: 4.")
@click.option("--driver-version", default=DEFAULT_DRIVER_VERSION, show_default=True)
@click.option("--persistence-mode", is_flag=True, help="Restores work without cuInit in the caller.")
@click.option(
    "--exclusive-memory", is_flag=True, help="Two workloads on one GPU at the same time overwrite each other."
)
@click.option("--seed", type=int, help="Makes GPU UUIDs and serials repeatable.")
@click.option(
    "--dir",
    "directory",
    type=DirectoryType(file_okay=False, path_type=Path),
    help="Keep the host in this directory. An existing host is used unchanged, and options that would change "
    "it are refused.",
)
@click.argument("program", nargs=-1, required=True, metavar="COMMAND...")
@click.pass_context
def exec_(
    ctx: click.Context,
    gpus: int,
    chip: str,
    memory: int | None,
    instant: bool,
    suspend_gbps: float | None,
    restore_gbps: float | None,
    driver_version: str,
    persistence_mode: bool,
    exclusive_memory: bool,
    seed: int | None,
    directory: Path | None,
    program: tuple[str, ...],
) -> None:
    """Run COMMAND on a simulated GPU host, and exit with its status.

    The host is new and is deleted after the command, unless --dir names a directory to keep it in.
    """

    def create(where: Path) -> SimulatedHost:
        return SimulatedHost.create(
            where,
            gpus=gpus,
            chip=chip.split(",") if "," in chip else chip,
            memory_bytes=memory,
            driver_version=driver_version,
            persistence_mode=persistence_mode,
            exclusive_memory=exclusive_memory,
            timing=_timing(instant, suspend_gbps, restore_gbps),
            seed=seed,
        )

    if directory is None:
        with tempfile.TemporaryDirectory(prefix="leasehold-simgpu-") as temporary:
            status = run_with_signals(program, {**os.environ, **create(Path(temporary)).environment()})
    else:
        host = _open_unchanged(ctx, directory) if (directory / "state").exists() else create(directory)
        status = run_with_signals(program, {**os.environ, **host.environment()})
    sys.exit(status)


@command.command("build")
def build_() -> None:
    """Compile the simulated libraries and print their directory."""
    click.echo(build())


@command.command("show")
@directory_option
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def show(directory: Path, output: str) -> None:
    """Show the GPUs, processes and faults of a host."""
    host = SimulatedHost.open(directory)
    gpus, processes, faults = host.gpus, host.processes(), host.faults()
    if output == "json":
        facts = {
            "driver_version": host.driver_version,
            "cuda_version": host.cuda_version,
            "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
            "processes": [
                {**dataclasses.asdict(process), "state": process.state.name} for process in processes
            ],
            "faults": [dataclasses.asdict(fault) for fault in faults],
        }
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(
        f"driver {host.driver_version}, CUDA {host.cuda_version // 1000}.{host.cuda_version % 1000 // 10}"
    )
    for gpu in gpus:
        marks = "  lost" * gpu.lost + "  MIG" * gpu.mig_enabled
        used = f"{_mib(gpu.used_bytes)} of {_mib(gpu.memory_bytes)} MiB"
        click.echo(f"{gpu.index:>3}  {gpu.uuid}  {gpu.chip:<5} {used}{marks}")
    for process in processes:
        places = ", ".join(f"{uuid} {_mib(size)} MiB" for uuid, size in process.gpu_bytes.items())
        marks = "  wedged" * process.wedged + "  busy" * process.busy + "  MPS" * process.mps_client
        marks += "  multicast" * process.multicast + "  partial passthrough" * process.partial_passthrough
        marks += "  profiler" * process.profiler + "  IPC importer" * process.ipc_importer
        if process.peers:
            marks += f"  peers {','.join(map(str, process.peers))}"
        click.echo(f"pid {process.pid}  {process.state.name}{marks}  {places}")
    for fault in faults:
        click.echo(f"fault {fault.id}  {_describe(fault)}")


command.add_command(fault_group)


@command.command("busy")
@directory_option
@click.option("--off", is_flag=True, help="End this work, so that a lock succeeds again.")
@click.argument("pid", type=int)
def busy(directory: Path, off: bool, pid: int) -> None:
    """Give process PID work that never drains: its lock waits or times out."""
    SimulatedHost.open(directory).set_busy(pid, not off)


@command.command("mps")
@directory_option
@click.option("--off", is_flag=True, help="Let it compute without MPS again.")
@click.argument("pid", type=int)
def mps(directory: Path, off: bool, pid: int) -> None:
    """Make process PID a client of MPS: NVML lists it as such, and its checkpoint is refused."""
    SimulatedHost.open(directory).set_mps_client(pid, not off)


@command.command("multicast")
@directory_option
@click.option("--off", is_flag=True, help="Remove the multicast group: a blocked checkpoint continues.")
@click.argument("pid", type=int)
def multicast(directory: Path, off: bool, pid: int) -> None:
    """Give process PID a multicast group: its checkpoint hangs."""
    SimulatedHost.open(directory).set_multicast(pid, not off)


@command.command("partial-passthrough")
@directory_option
@click.option("--off", is_flag=True, help="Give it all GPUs of the host again.")
@click.argument("pid", type=int)
def partial_passthrough(directory: Path, off: bool, pid: int) -> None:
    """Put process PID into a container with some of the host's GPUs: its checkpoint answers 800."""
    SimulatedHost.open(directory).set_partial_passthrough(pid, not off)


@command.command("profiler")
@directory_option
@click.option("--off", is_flag=True, help="Detach the profiler.")
@click.argument("pid", type=int)
def profiler(directory: Path, off: bool, pid: int) -> None:
    """Attach a profiler (CUPTI) to process PID: its lock answers 801."""
    SimulatedHost.open(directory).set_profiler(pid, not off)


@command.command("ipc-importer")
@directory_option
@click.option("--off", is_flag=True, help="Close the imported memory. A wedged process stays wedged.")
@click.argument("pid", type=int)
def ipc_importer(directory: Path, off: bool, pid: int) -> None:
    """Let process PID import memory by CUDA IPC: its restore answers 1 and wedges the process."""
    SimulatedHost.open(directory).set_ipc_importer(pid, not off)


@command.command("peers")
@directory_option
@click.option("--off", is_flag=True, help="Remove their peers.")
@click.argument("pids", metavar="PID...", type=int, nargs=-1, required=True)
def peers(directory: Path, off: bool, pids: tuple[int, ...]) -> None:
    """Make processes peers, like ranks of an NCCL job: calls on one hang while another is suspended."""
    SimulatedHost.open(directory).set_peers(pids, not off)


@command.command("gpu")
@directory_option
@click.option("--hog", type=SizeType(), help="Memory used by something else. 0 frees it.")
@click.option("--lost/--found", default=None, help="Let the GPU fall off the bus, or come back.")
@click.option("--mig/--no-mig", "mig_enabled", default=None, help="Switch MIG mode.")
@click.option("--ecc-corrected", type=click.IntRange(min=0), help="Count of corrected ECC errors.")
@click.option("--ecc-uncorrected", type=click.IntRange(min=0), help="Count of uncorrected ECC errors.")
@click.option("--temperature-c", type=click.IntRange(0, 150))
@click.option("--utilization-percent", type=click.IntRange(0, 100))
@click.option(
    "--hide-process-memory/--show-process-memory",
    "hides_process_memory",
    default=None,
    help="Hide the memory of processes from NVML.",
)
@click.option(
    "--throttle",
    "throttle_reasons",
    type=ThrottleReasonType(),
    help="Reasons of throttling, such as hw-slowdown,sw-power-cap, or none.",
)
@click.option("--remapped-rows-corrected", type=click.IntRange(min=0), help="Rows remapped, from Ampere on.")
@click.option("--remapped-rows-uncorrected", type=click.IntRange(min=0))
@click.option("--row-remap-pending/--no-row-remap-pending", default=None, help="A remap waits for a reset.")
@click.option("--row-remap-failed/--no-row-remap-failed", default=None, help="No spare row was left.")
@click.option(
    "--retired-pages-single-bit", type=click.IntRange(0, 64), help="Pages retired, before Ampere (T4)."
)
@click.option("--retired-pages-double-bit", type=click.IntRange(0, 64))
@click.option(
    "--retired-pages-pending/--no-retired-pages-pending", default=None, help="A page waits for a reset."
)
@click.argument("gpu")
def gpu_(directory: Path, gpu: str, hog: int | None, lost: bool | None, **readings: int | None) -> None:
    """Change the state or the readings of GPU (index or UUID)."""
    host = SimulatedHost.open(directory)
    key = _gpu_key(gpu)
    host.set_readings(key, **{name: int(value) for name, value in readings.items() if value is not None})
    if hog is not None:
        host.hog(key, hog)
    if lost is not None:
        host.lose_gpu(key, lost)


@command.command("xid")
@directory_option
@click.argument("gpu")
@click.argument("xid", type=click.IntRange(min=1))
def xid_(directory: Path, gpu: str, xid: int) -> None:
    """Report error XID of GPU (index or UUID) to registered processes. 48 is a double-bit ECC error."""
    SimulatedHost.open(directory).raise_xid(_gpu_key(gpu), xid)


def _gpu_key(gpu: str) -> int | str:
    return int(gpu) if gpu.isdecimal() else gpu


def _timing(instant: bool, suspend_gbps: float | None, restore_gbps: float | None) -> Timing:
    if instant and (suspend_gbps is not None or restore_gbps is not None):
        raise InvalidSettingError("--instant takes no time: leave --suspend-gbps and --restore-gbps out")
    if instant:
        return Timing.instant()
    timing = Timing.typical()
    if suspend_gbps is not None:
        timing = dataclasses.replace(timing, suspend_bytes_per_s=suspend_gbps * 1e9)
    if restore_gbps is not None:
        timing = dataclasses.replace(timing, restore_bytes_per_s=restore_gbps * 1e9)
    return timing


def _open_unchanged(ctx: click.Context, directory: Path) -> SimulatedHost:
    """Opens an existing host.

    Raises:
        InvalidSettingError: An option would change the host.
    """
    host = SimulatedHost.open(directory)
    chips = [gpu.chip.lower() for gpu in host.gpus]
    has: dict[str, Callable[[Any], bool]] = {
        "gpus": lambda wanted: wanted == len(host.gpus),
        "chip": lambda wanted: [chip.lower() for chip in wanted.split(",")] in (chips, sorted(set(chips))),
        "memory": lambda wanted: all(gpu.memory_bytes == wanted for gpu in host.gpus),
        "driver_version": lambda wanted: wanted == host.driver_version,
    }
    for parameter in ctx.command.params:
        name = parameter.name or ""
        given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name in has and has[name](ctx.params[name]):
            continue
        if given and name not in {"directory", "program"}:
            raise InvalidSettingError(
                f"{parameter.opts[0]} cannot change the existing host in {directory}, which has "
                f"{len(host.gpus)} GPUs: leave the option out, or name a new directory"
            )
    return host


def _describe(fault: Fault) -> str:
    short = {name: action for action, name in CALL_OF_ACTION.items()}
    shown = [f"{name}={value}" for name, value in dataclasses.asdict(fault).items() if value and name != "id"]
    return " ".join(shown).replace(f"call={fault.call}", short.get(fault.call, fault.call))


def _mib(size: int) -> int:
    return size // 2**20
