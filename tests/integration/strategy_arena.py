"""Plays cases of :mod:`.strategy_cases` on a real fleet.

Something goes wrong on the way down or up, and afterwards the workload is as before or as asked, never in
between: its state, its lease, the pool, NVML, its server, and what is on disk.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from leasehold.v1 import gpu_pb2
from leasehold.v1.command_pb2 import Command
from leasehold_client.arguments.policies import parse_policy
from leasehold_client.coordinator.client import Client

from tests.environment import CRIU

from .fleets import Fleet
from .models import HOOK_TIMEOUT, STATES, WORKER, Model, reason, told
from .strategy_cases import DOWN, UP, Case, Kind

GPUS: Final = 10
HANGING_TIMEOUT: Final = "10s"
"""The hook timeout of a server that does not answer. All other calls of its hook must end within it."""
NOT_PLAYED: Final = "not played: no images"

SETTINGS: Final = """
stop_workloads = "leave"
driver_call_floor_s = 5.0
proof_timeout_s = 1.0
criu = "{criu}"
"""

WRAPPER: Final = """#!/bin/sh
# A criu that does what {mode} says, while that is there.
read -r what pid 2>/dev/null <{mode}
case "$what" in
fails) echo 'Error (told to fail)' >&2; exit 1 ;;
full) trap '' XFSZ; ulimit -f 256 ;;
killed)
    {criu} "$@" &
    while [ ! -d /proc/$pid ] && [ -d /proc/$! ]; do :; done
    kill -9 $!
    exit 1 ;;
esac
exec {criu} "$@"
"""
"""``full``: no file may be larger than 128 KiB, which is how a full disk looks. ``killed``: once the process
that is brought back is there."""


@dataclass
class Tally:
    """What has become of the cases.

    Attributes:
        outcomes: How commands ended, with how many did.
        problems: What was not as it must be.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Arena:
    """A fleet, and a model server of each kind, which cases are played on one after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.criu_mode = fleet.folder / "criu.mode"
        wrapper = fleet.folder / "criu"
        if CRIU.exists():
            wrapper.write_text(WRAPPER.format(mode=self.criu_mode, criu=CRIU))
            wrapper.chmod(0o755)
        self.settings = SETTINGS.format(criu=wrapper)
        fleet.start_worker(WORKER, settings=self.settings, gpus=GPUS)
        self.models: dict[tuple[bool, str, int, bool], Model] = {}
        self._homes: dict[str, list[str]] = {}
        self._made = 0
        self._log_read = 0

    @property
    def client(self) -> Client:
        return self.fleet.client

    def why_no_images(self) -> str:
        """Why its worker writes none. Empty: it does."""
        (worker,) = self.client.workers()
        capability = next(each for each in worker.capabilities if each.name == "checkpoint_image")
        return "" if capability.available else capability.reason or "the worker can't write images"

    def model_of(self, case: Case) -> Model:
        """The model server of a case, which runs."""
        key = kernel, _, _, hangs = _key(case)
        if key not in self.models:
            self._made += 1
            name = f"{'saver' if kernel else 'chat'}-{self._made}"
            model = Model(self.fleet, name, kernel=kernel, framework=case.framework, gpu_count=case.gpus)
            model.start(timeout=HANGING_TIMEOUT if hangs else HOOK_TIMEOUT)
            self.models[key] = model
            self._homes[name] = self._gpus_of(model)
        return self.models[key]

    def play(self, case: Case, tally: Tally) -> None:
        """Plays one case. What is not as it must be ends its model server, and is told."""
        model = self.model_of(case)
        try:
            with told(case):
                tally.outcomes[self._play(model, case)] += 1
        except Exception as error:  # the other cases are played all the same
            where = traceback.extract_tb(error.__traceback__)[-1]
            tally.problems.append(f"{case}: {where.name}, {where.line}: {error!r}"[:3000])
            self._give_up(_key(case))
        log = self.fleet.log(WORKER)[self._log_read :]
        self._log_read += len(log)
        if "Traceback" in log:
            tally.problems.append(
                f"{case}: a defect in the worker's log: {log[log.index('Traceback') :]}"[:3000]
            )

    def stop(self) -> None:
        """Ends its workloads."""
        for model in self.models.values():
            self.client.wait(self.client.stop(model.name, grace_s=0), check=False)

    def _give_up(self, key: tuple[bool, str, int, bool]) -> None:
        model = self.models.pop(key)
        self.criu_mode.unlink(missing_ok=True)
        self._restart()  # it may be dead, or have a crash point that it did not come to
        model.clear_faults()
        with contextlib.suppress(Exception):
            self.client.wait(self.client.stop(model.name, grace_s=0, force=True), check=False)

    def _play(self, model: Model, case: Case) -> str:
        parked_by = case.before if case.way == DOWN else case.process
        if parked_by:
            parked = model.suspend(f"{case.weights}+{parked_by}", force=not model.kernel)
            assert reason(parked) == "SUCCEEDED", parked
        self._require(model, case, parked_by)
        with ExitStack() as undo:
            undo.callback(model.clear_faults)
            undo.enter_context(self._trouble(model, case))
            command = self._begin(model, case)
            if case.trouble.kind is Kind.KILL:
                self._see_it_die()
                self._restart()
            ended = self.client.wait(command, check=False)
            assert self._was_met(model, case), f"nothing went wrong: {ended}"
            sick = case.trouble.kind is Kind.GPU and self._homes[model.name][case.trouble.member]
        outcome = reason(ended)
        done = outcome == "SUCCEEDED"
        if sick and done and case.way == UP and case.process != "keep_running":
            assert sick not in model.gpus, "a workload that left a sick GPU is back on it"
        assert not (case.trouble.harmless and not done), ended
        assert not (done and not case.trouble.harmless and not case.trouble.may_succeed), ended
        if done:
            parked_by = case.process if case.way == DOWN else ""
        if case.trouble.half_awake and case.process == "keep_running":
            assert (outcome, model.state_name) == ("HOOK_FAILED", "RUNNING"), model.log()
            assert model.gpus, "it uses more of its GPUs than while it slept"
        else:
            self._require(model, case, parked_by)
        if parked_by:
            woken = model.wake()
            assert reason(woken) == "SUCCEEDED", woken
            if parked_by == "stop" and not model.kernel:
                model.requests = 0
            self._require(model, case, "")
        return outcome

    def _begin(self, model: Model, case: Case) -> Command:
        if case.way == DOWN:
            return self.client.suspend(model.name, policy=parse_policy(case.policy), force=not model.kernel)
        return self.client.restore(model.name)

    def _require(self, model: Model, case: Case, parked_by: str) -> None:
        """It is parked by a process strategy, or runs."""
        if not parked_by:
            model.wait_served()
            model.require_running()
            model.pid = model.state()["pid"]
            self._homes[model.name] = self._gpus_of(model)
            return
        freed = "all"
        if parked_by == "keep_running":
            freed = "nothing" if case.weights == "retain" else "weights"
        assert model.state_name == STATES[parked_by], model.log()
        model.require_parked(parked_by, freed=freed)

    def _was_met(self, model: Model, case: Case) -> bool:
        """Whether somebody did wrong what the case says; who is killed was seen to die."""
        trouble = case.trouble
        match trouble.kind:
            case Kind.SERVER:
                left = json.loads(model.faults.read_text()).get(trouble.where, ["", 0])
                return int(left[1]) < trouble.times
            case Kind.DRIVER:
                return not model.host.faults()
        return True

    # --- Trouble

    @contextmanager
    def _trouble(self, model: Model, case: Case) -> Iterator[None]:
        trouble = case.trouble
        match trouble.kind:
            case Kind.SERVER:
                model.fail_at(trouble.where, trouble.fault, trouble.times)
                yield
            case Kind.DRIVER:
                # A process that comes back from disk has its pid again.
                pid = model.members[trouble.member].pid if trouble.member else model.pid
                model.host.set_fault(trouble.where, pid, times=trouble.times, **trouble.driver)
                yield
            case Kind.GPU:
                with self._sick_gpu(self._homes[model.name][trouble.member]):
                    yield
            case Kind.CRIU:
                self.criu_mode.write_text(f"{trouble.where} {model.pid}\n")
                yield
                self.criu_mode.unlink()
            case Kind.DISK:
                with self._disk(model, trouble.where):
                    yield
            case Kind.PID:
                with occupied_pid(model.pid):
                    yield
            case Kind.PORT:
                with socket.create_server(("127.0.0.1", model.port)):
                    yield
            case Kind.PROGRAM:
                model.program.rename(model.program.with_suffix(".away"))
                yield
                model.program.with_suffix(".away").rename(model.program)
            case Kind.KILL:
                self._restart(trouble.where)
                yield

    @contextmanager
    def _sick_gpu(self, gpu_uuid: str) -> Iterator[None]:
        """Has a GPU count a memory error for a while, once the worker has seen it."""
        host = self.fleet.hosts[WORKER]
        host.set_readings(gpu_uuid, ecc_uncorrected=1)
        self.fleet.cli("gpu", "reset-health", gpu_uuid)  # the worker looks at once
        self.fleet.wait(lambda: self._health(gpu_uuid) == gpu_pb2.GPU_HEALTH_ECC_FAILED)
        yield
        host.set_readings(gpu_uuid, ecc_uncorrected=0)
        self.fleet.cli("gpu", "reset-health", gpu_uuid)
        self.fleet.wait(lambda: self._health(gpu_uuid) == gpu_pb2.GPU_HEALTH_OK)

    def _health(self, gpu_uuid: str) -> gpu_pb2.GpuHealth.ValueType:
        (gpu,) = (gpu for gpu in self.client.gpus() if gpu.gpu.uuid == gpu_uuid)
        return gpu.lease.health

    @contextmanager
    def _disk(self, model: Model, what: str) -> Iterator[None]:
        """Alters or takes away what a workload is woken from, for a while."""
        folder = model.images / model.workload.workload_id
        if what == "gone":
            away = self.fleet.folder / "away"
            folder.rename(away)
            yield
            shutil.rmtree(folder, ignore_errors=True)
            away.rename(folder)
            return
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
        before = {path: path.read_bytes() for path in files}
        for path in files if model.kernel else [max(files, key=lambda path: path.stat().st_size)]:
            altered = bytearray(before[path])
            altered[-1] ^= 1
            path.write_bytes(altered)
        yield
        for path in files:
            path.write_bytes(before[path])

    def _gpus_of(self, model: Model) -> list[str]:
        """The GPU of each of its processes."""
        return [next(iter(member.gpu_bytes)) for member in model.members]

    def _see_it_die(self) -> None:
        process = self.fleet.processes[WORKER]
        self.fleet.wait(lambda: process.poll() is not None)

    def _restart(self, crash_point: str = "") -> None:
        process = self.fleet.processes.pop(WORKER, None)
        if process is not None:
            if process.poll() is None:
                process.kill()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
        self.fleet.start_worker(WORKER, settings=self.settings, crash_point=crash_point)
        for model in self.models.values():
            if model.kernel and model.state_name == "RUNNING":
                # Until it is back, stopping it would lose what it has computed, and is refused.
                self.fleet.wait(partial(_would_be_saved, model))


def _key(case: Case) -> tuple[bool, str, int, bool]:
    """The kind of a case's model server: kernel, framework, number of GPUs, and whether a call hangs."""
    hangs = case.trouble.kind is Kind.SERVER and case.trouble.fault == "hang"
    return case.process == "stop" and not case.before, case.framework, case.gpus, hangs


def _would_be_saved(model: Model) -> bool:
    return not model.client.plan_suspend(model.name, policy=parse_policy("stop")).refusals


@contextmanager
def occupied_pid(pid: int) -> Iterator[None]:
    """Gives a pid to a process of ours. Needs root.

    Those after it are left alone: threads of who is to come back had them.
    """
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    before = last_pid.read_text()
    for _ in range(200):
        last_pid.write_text(str(pid - 1))
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        if process.pid == pid:
            break
        process.communicate()
    last_pid.write_text(before)
    assert process.pid == pid
    try:
        yield
    finally:
        process.communicate()


def play_all(arena: Arena, cases: list[Case]) -> Tally:
    """Plays cases, and tells what became of them."""
    tally = Tally()
    without_images = arena.why_no_images()
    for case in cases:
        if "checkpoint" in (case.process, case.before) and without_images:
            tally.outcomes[NOT_PLAYED] += 1
            continue
        known = len(tally.problems)
        arena.play(case, tally)
        for problem in tally.problems[known:]:
            print(problem, file=sys.stderr, flush=True)
    return tally
