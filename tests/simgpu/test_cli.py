"""`leasehold simgpu`, run as users run it, and the building of the libraries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from leasehold_simgpu import CompilerError, InvalidSettingError, NoSuchHostError, SimulatedHost, build

from tests import prefork

from .conftest import MakeHost, StartProgram
from .programs import COUNTER, NOT_PERMITTED, NOT_READY, NOT_SUPPORTED, OPERATING_SYSTEM, Program

CODE = "from leasehold_simgpu.cli import command; command(prog_name='simgpu')"


def simgpu(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return prefork.run(CODE, list(map(str, arguments)), env=os.environ, timeout=60)


def test_exec_runs_a_program_on_a_new_host() -> None:
    counter: list[str | Path] = [
        sys.executable,
        COUNTER,
        "--bytes",
        "1MiB",
        "--interval-s",
        "0",
        "--counts",
        "3",
    ]
    done = simgpu("exec", "--gpus", "2", "--chip", "L4", "--memory", "1GiB", "--", *counter)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["count=0", "count=1", "count=2"]


def test_exec_ends_as_its_program_ends() -> None:
    assert simgpu("exec", "--", "sh", "-c", "exit 7").returncode == 7
    assert simgpu("exec", "--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_exec_hands_signals_on(number: signal.Signals) -> None:
    source = (
        "import signal, sys\n"
        f"waited = {{{int(number)}}}\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, waited)\n"  # a handler may run before signal.pause()
        "print('ready', flush=True)\n"
        "signal.sigwait(waited)\n"
        "sys.exit(33)\n"
    )
    command = [sys.executable, "-c", CODE, "exec", "--", sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 33


def test_exec_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert simgpu("exec", "--", "sh", "-c", 'test -f "$LEASEHOLD_SIMGPU_DIR/state"').returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_exec_keeps_and_reuses_a_named_host(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    assert simgpu("exec", "--gpus", "3", "--dir", directory, "--", "true").returncode == 0
    first = SimulatedHost.open(directory).gpus
    assert len(first) == 3
    assert simgpu("exec", "--dir", directory, "--", "true").returncode == 0
    assert SimulatedHost.open(directory).gpus == first
    same = ("--gpus", "3", "--chip", "h100", "--memory", "80GiB", "--driver-version", "580.95.05")
    assert simgpu("exec", *same, "--dir", directory, "--", "true").returncode == 0
    for option in (("--chip", "A100"), ("--memory", "1GiB"), ("--seed", "1")):
        refused = simgpu("exec", *option, "--dir", directory, "--", "true")
        assert f"{option[0]} cannot change the existing host" in refused.stderr
    refused = simgpu("exec", "--gpus", "2", "--dir", directory, "--", "true")
    assert refused.returncode == 2
    assert "--gpus cannot change the existing host" in refused.stderr


def test_show_tells_what_goes_on(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=2)
    program = start_program(host)
    program.set_up()
    program.lock(program.pid)
    shown = simgpu("show", "--dir", host.directory)
    assert host.gpus[1].uuid in shown.stdout
    assert f"pid {program.pid}  LOCKED" in shown.stdout
    facts = json.loads(simgpu("show", "-o", "json", "--dir", host.directory).stdout)
    assert [gpu["uuid"] for gpu in facts["gpus"]] == [gpu.uuid for gpu in host.gpus]
    assert facts["processes"][0]["state"] == "LOCKED"


@pytest.mark.long
def test_faults_come_and_go_by_command(host: SimulatedHost, controller: Program, target: Program) -> None:
    where = ("--dir", host.directory)
    number = simgpu("fault", "set", *where, "lock", "--pid", str(target.pid), "--error", "600").stdout.strip()
    assert controller.lock(target.pid) == NOT_READY
    assert "lock" in simgpu("show", *where).stdout
    assert simgpu("fault", "clear", *where, "--id", number).stdout == "1\n"
    assert controller.lock(target.pid) == 0


@pytest.mark.long
def test_gpus_and_processes_change_by_command(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    where = ("--dir", host.directory)
    options = ("--hog", "3GiB", "--lost", "--mig", "--ecc-uncorrected", "4")
    assert simgpu("gpu", *where, *options, host.gpus[1].uuid).returncode == 0
    gpu = host.gpus[1]
    assert (gpu.hogged_bytes, gpu.lost, gpu.mig_enabled) == (3 * 2**30, True, True)
    assert simgpu("gpu", *where, "--found", "--no-mig", "--hog", "0", "1").returncode == 0
    assert host.gpus[1].lost is False
    assert controller.nvml("nvmlDeviceGetTotalEccErrors", 1, 1, 0) == 4
    assert simgpu("busy", *where, str(target.pid)).returncode == 0
    assert controller.lock(target.pid, 20) == NOT_READY
    assert simgpu("busy", *where, "--off", str(target.pid)).returncode == 0
    assert controller.lock(target.pid, 1000) == 0
    assert simgpu("mps", *where, str(target.pid)).returncode == 0
    assert f"pid {target.pid}  LOCKED  MPS" in simgpu("show", *where).stdout
    assert controller.checkpoint(target.pid) == NOT_SUPPORTED
    assert simgpu("mps", *where, "--off", str(target.pid)).returncode == 0
    assert controller.checkpoint(target.pid) == 0


def test_processes_are_marked_by_command(host: SimulatedHost, controller: Program, target: Program) -> None:
    where = ("--dir", host.directory)
    assert simgpu("multicast", *where, str(target.pid)).returncode == 0
    assert simgpu("partial-passthrough", *where, str(target.pid)).returncode == 0
    assert f"pid {target.pid}  RUNNING  multicast  partial passthrough" in simgpu("show", *where).stdout
    assert simgpu("multicast", *where, "--off", str(target.pid)).returncode == 0
    assert controller.lock(target.pid) == 0
    assert controller.checkpoint(target.pid) == NOT_PERMITTED
    assert simgpu("partial-passthrough", *where, "--off", str(target.pid)).returncode == 0
    assert controller.unlock(target.pid) == 0
    assert simgpu("profiler", *where, str(target.pid)).returncode == 0
    assert simgpu("ipc-importer", *where, str(target.pid)).returncode == 0
    assert f"pid {target.pid}  RUNNING  profiler  IPC importer" in simgpu("show", *where).stdout
    assert controller.lock(target.pid) == NOT_SUPPORTED
    for mark in ("profiler", "ipc-importer"):
        assert simgpu(mark, *where, "--off", str(target.pid)).returncode == 0
    assert f"pid {target.pid}  RUNNING  {host.gpus[0].uuid}" in simgpu("show", *where).stdout
    assert controller.lock(target.pid) == 0
    assert controller.checkpoint(target.pid) == 0


@pytest.mark.long
def test_processes_become_peers_by_command(
    host: SimulatedHost, target: Program, start_program: StartProgram
) -> None:
    where = ("--dir", host.directory)
    peer = start_program(host)
    peer.set_up()
    assert simgpu("peers", *where, str(target.pid), str(peer.pid)).returncode == 0
    assert f"pid {target.pid}  RUNNING  peers {peer.pid}" in simgpu("show", *where).stdout
    assert simgpu("peers", *where, "--off", str(peer.pid)).returncode == 0
    assert "peers" not in simgpu("show", *where).stdout


@pytest.mark.long
def test_a_target_can_be_made_to_die_later_by_command(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    options = ("--signal", "SEGV", "--signal-delay-s", "0.5", "--error", "304", "--pid", str(target.pid))
    assert simgpu("fault", "set", "--dir", host.directory, "lock", *options).returncode == 0
    assert controller.lock(target.pid) == OPERATING_SYSTEM
    assert target.wait() == -signal.SIGSEGV


def test_faults_can_be_set_for_later_calls_by_command(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    where = ("--dir", host.directory)
    simgpu("fault", "set", *where, "get_state", "--error", "304", "--after", "1", "--times", "1")
    assert "after=1" in simgpu("show", *where).stdout
    assert [controller.get_state(target.pid)[0] for _ in range(3)] == [0, 304, 0]


def test_what_processes_take_can_be_hidden_by_command(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    where = ("--dir", host.directory)
    assert simgpu("gpu", *where, "--hide-process-memory", "0").returncode == 0
    assert controller.nvml_processes()[host.gpus[0].uuid] == {str(target.pid): None}
    assert simgpu("gpu", *where, "--show-process-memory", "0").returncode == 0
    assert controller.nvml_processes()[host.gpus[0].uuid] == {str(target.pid): 0}


@pytest.mark.long
def test_gpus_fall_ill_by_command(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=2, chip=["H100", "T4"])
    program = start_program(host)
    where = ("--dir", host.directory)
    rows = ("--remapped-rows-corrected", "1", "--remapped-rows-uncorrected", "2", "--row-remap-failed")
    throttle = ("--throttle", "hw-slowdown,sw-thermal-slowdown")
    assert simgpu("gpu", *where, *rows, "--row-remap-pending", *throttle, "0").returncode == 0
    assert program.nvml("nvmlDeviceGetRemappedRows", 0) == [1, 2, 1, 1]
    assert program.nvml("nvmlDeviceGetCurrentClocksEventReasons", 0) == 0x28
    assert simgpu("gpu", *where, "--no-row-remap-failed", "--throttle", "none", "0").returncode == 0
    assert program.nvml("nvmlDeviceGetRemappedRows", 0) == [1, 2, 1, 0]
    assert program.nvml("nvmlDeviceGetCurrentClocksEventReasons", 0) == 0
    pages = ("--retired-pages-single-bit", "2", "--retired-pages-double-bit", "1", "--retired-pages-pending")
    assert simgpu("gpu", *where, *pages, "1").returncode == 0
    assert [len(program.nvml("nvmlDeviceGetRetiredPages", 1, cause)) for cause in (0, 1)] == [2, 1]
    assert program.nvml("nvmlDeviceGetRetiredPagesPendingStatus", 1) == 1
    program.listen([0, 1])
    assert simgpu("xid", *where, host.gpus[1].uuid, "48").returncode == 0
    assert program.next_event() == [1, 8, 48]
    assert "unknown reason of throttling 'hot'" in simgpu("gpu", *where, "--throttle", "hot", "0").stderr
    assert "GPU 9 is not on the host" in simgpu("xid", *where, "9", "48").stderr
    assert simgpu("xid", *where, "0", "0").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["exec", "--gpus", "0", "--", "true"], 2, "0 GPUs cannot be simulated: choose 1 to 16"),
        (["exec", "--chip", "H9000", "--", "true"], 2, "chip 'H9000' is not simulated: choose one of"),
        (["exec", "--chip", "H100,L4", "--", "true"], 2, "2 chips for 4 GPUs"),
        (["exec", "--memory", "lots", "--", "true"], 2, "'lots' is not a size: write one like 80GiB"),
        (["exec", "--memory", "9TiB", "--", "true"], 2, "choose up to 1 TiB"),
        (["exec", "--driver-version", "1.2", "--", "true"], 2, "has an unknown branch: choose one of 550"),
        (["exec", "--instant", "--suspend-gbps", "2", "--", "true"], 2, "--instant takes no time"),
        (["exec", "--suspend-gbps", "nan", "--", "true"], 2, "bandwidth of nan GB/s is out of range"),
        (["exec", "--suspend-gbps", "1e400", "--", "true"], 2, "choose 0 to 1000000 GB/s"),
        (["exec", "--restore-gbps", "inf", "--", "true"], 2, "bandwidth of inf GB/s is out of range"),
        (["exec", "--", "/no/such/program"], 2, "cannot be started: No such file or directory"),
        (
            ["show", "--dir", "/no/such/host"],
            1,
            "create one with `leasehold simgpu exec --dir /no/such/host ",
        ),
        (["show"], 2, "--dir"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], status: int, says: str) -> None:
    done = simgpu(*arguments)
    assert done.returncode == status
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("Error: ")]) == 1


@pytest.mark.long
def test_bad_targets_are_refused(host: SimulatedHost) -> None:
    where = ("--dir", host.directory)
    assert "GPU 9 is not on the host" in simgpu("gpu", *where, "--lost", "9").stderr
    assert "pid 1 is not a live CUDA process" in simgpu("busy", *where, "1").stderr
    for mark in ("mps", "multicast", "partial-passthrough", "peers"):
        assert "pid 1 is not a live CUDA process" in simgpu(mark, *where, "1").stderr
    assert "is not a driver function" in simgpu("fault", "set", *where, "sing").stderr
    with pytest.raises(InvalidSettingError):
        host.hog(99, 1)
    with pytest.raises(InvalidSettingError):
        host.set_readings(0, no_such_reading=1)


def test_a_host_is_made_once_and_found_again(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host(gpus=2, seed=5)
    assert SimulatedHost.open(host.directory).gpus == host.gpus
    assert make_host(gpus=2, seed=5).gpus == host.gpus
    assert make_host(gpus=2).gpus != host.gpus
    with pytest.raises(InvalidSettingError, match="already holds a simulated host"):
        SimulatedHost.create(host.directory)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSettingError, match="cannot hold a simulated host: Not a directory"):
        SimulatedHost.create(tmp_path / "file/below")
    (tmp_path / "state").write_bytes(b"something else")
    with pytest.raises(NoSuchHostError, match="another version"):
        SimulatedHost.open(tmp_path)


@pytest.mark.long
def test_the_libraries_are_built_once_however_many_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        (directory,) = set(threads.map(lambda _: build(), range(2)))
    assert sorted(path.name for path in directory.iterdir()) == ["libcuda.so.1", "libnvidia-ml.so.1"]
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    monkeypatch.setenv("PATH", "")
    assert build() == directory


def test_without_a_compiler_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompilerError, match=r"'no-such-compiler' not found: .* apt install gcc"):
        build()


def test_a_cache_that_can_not_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        CompilerError, match=r"can't keep its libraries in .*file/leasehold/simgpu \(Not a dir"
    ):
        build()


@pytest.mark.long
def test_the_sources_compile_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "strict-cc"
    compiler.write_text('#!/bin/sh\nexec cc -Werror -Wshadow -Wstrict-prototypes "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    build()
