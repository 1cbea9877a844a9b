"""The steps of the demonstration, and the verification of their results."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from leasehold.v1.command_pb2 import COMMAND_STATE_RUNNING, COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.lease_pb2 import SLOT_STATE_FREE
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec

from leasehold_client.arguments.gpu_names import gpu_places
from leasehold_client.coordinator.client import Client
from leasehold_client.demo.counts import CounterReport, read_counter
from leasehold_client.demo.fleet import DemoError, DemoFleet
from leasehold_client.demo.screen import DemoScreen
from leasehold_client.display.outcome import failure_lines
from leasehold_client.messages import operation_name, workload_state

COUNTERS: Final = tuple(f"counter-{number}" for number in range(1, 7))
COUNTER_BYTES: Final = "8MiB"
MORE_COUNTS: Final = 3
"""Further counts that show that a counter is running."""

COMMAND_TIMEOUT_S: Final = 30.0


@final
class Scenario:
    """One run on a fleet that has just started.

    Args:
        fleet: The daemons.
        client: A client of the coordinator.
        owner: A client of the Unix user whose workloads the counters are.
        screen: The output.
        counter: The counting program.
    """

    def __init__(
        self, fleet: DemoFleet, client: Client, owner: Client, screen: DemoScreen, counter: Path
    ) -> None:
        self._owner = owner
        self._fleet = fleet
        self._client = client
        self._screen = screen
        self._counter = counter
        self._done = {"suspend": 0, "restore": 0, "remap": 0}
        self._moved: dict[str, str] = {}

    def run(self) -> dict[str, int]:
        """Runs the steps, and returns the figures.

        Raises:
            DemoError: A step failed, or a counter is on the wrong GPU.
            LeaseholdError: The coordinator refused a step.
        """
        self._start_counters()
        self._suspend_two()
        self._restore_elsewhere()
        self._remap_under_a_new_coordinator()
        self._restore_the_other()
        return self._verify()

    def _start_counters(self) -> None:
        self._screen.say(f"two workers with four simulated GPUs each; {len(COUNTERS)} counters start")
        for index, name in enumerate(COUNTERS):
            self._start(name, "alpha" if index < 3 else "beta")
        self._wait_counting(COUNTERS)
        self._show_leases()

    def _suspend_two(self) -> None:
        self._screen.say("counter-1 and counter-2 are suspended, and their GPUs are free")
        for name in ("counter-1", "counter-2"):
            self._finish(self._client.suspend(name, timeout_s=COMMAND_TIMEOUT_S), name)
        self._show_leases()
        self._screen.say("another workload starts on the freed GPUs")
        self._start("newcomer", "alpha", gpu_count=2)
        self._wait_counting(["newcomer"])
        self._show_leases()

    def _restore_elsewhere(self) -> None:
        self._screen.say("counter-1 is restored on another GPU, since its former GPU is leased")
        [old] = self._client.workload("counter-1").status.parked_gpu_uuids
        self._finish(self._client.restore("counter-1", timeout_s=COMMAND_TIMEOUT_S), "counter-1")
        if self._gpu_of("counter-1") == old:
            raise DemoError("counter-1 was restored on a GPU of another workload")
        self._moved["counter-1"] = self._gpu_of("counter-1")
        self._show_leases()

    def _remap_under_a_new_coordinator(self) -> None:
        self._screen.say(
            "counter-4 is moved while it runs, and the coordinator is killed and replaced during the move"
        )
        target = self._free_gpu("beta")
        pairs = [(self._gpu_of("counter-4"), target)]
        begun = self._client.remap({"counter-4": pairs}, timeout_s=COMMAND_TIMEOUT_S)
        old_pid = self._fleet.coordinator_pid
        for current in self._client.watch(begun):
            if current.state == COMMAND_STATE_RUNNING and self._fleet.coordinator_pid == old_pid:
                self._fleet.replace_coordinator()
                self._screen.say(f"  coordinator {old_pid} is dead; {self._fleet.coordinator_pid} takes over")
        if self._fleet.coordinator_pid == old_pid:
            raise DemoError("counter-4 was moved before the coordinator was replaced")
        self._show_outcome(current, "counter-4")
        self._moved["counter-4"] = target
        self._show_leases()

    def _restore_the_other(self) -> None:
        self._screen.say("the newcomer is stopped, and counter-2 is restored")
        self._finish(self._client.stop("newcomer", timeout_s=COMMAND_TIMEOUT_S), "newcomer")
        self._finish(self._client.restore("counter-2", timeout_s=COMMAND_TIMEOUT_S), "counter-2")
        self._wait_counting(COUNTERS)
        self._show_leases()

    def _start(self, name: str, worker: str, gpu_count: int = 1) -> None:
        options = ["--bytes", COUNTER_BYTES, "--interval-s", "0.1"]
        spec = WorkloadSpec(
            arguments=[sys.executable, str(self._counter), *options], resources=Resources(gpu_count=gpu_count)
        )
        _, command = self._owner.run(spec, name=name, worker=worker, timeout_s=COMMAND_TIMEOUT_S)
        self._finish(command, name)

    def _finish(self, command: Command, name: str) -> None:
        """Waits for the success of a command, and shows its outcome."""
        self._show_outcome(self._client.wait(command, check=False), name)

    def _show_outcome(self, command: Command, name: str) -> None:
        kind = operation_name(command)
        if command.state != COMMAND_STATE_SUCCEEDED:
            raise DemoError("; ".join(line.strip() for line in [name, *failure_lines(command)]))
        seconds = command.result.duration.ToTimedelta().total_seconds()
        self._screen.say(f"  {kind} {name}: {seconds:.2f} s on the worker")
        moving = [pair for pair in command.result.applied_pairs if pair.old_uuid != pair.new_uuid]
        places = gpu_places(self._known_gpus())
        for pair in moving:
            old, new = places[pair.old_uuid], places[pair.new_uuid]
            self._screen.say(f"    pair {old} {pair.old_uuid} -> {new} {pair.new_uuid}")
        if kind in self._done:
            self._done[kind] += 1

    def _known_gpus(self) -> list[FleetGpu]:
        """All GPUs, once both workers have reported to the current coordinator."""
        self._fleet.wait_until_reported(self._client)
        return self._client.gpus()

    def _gpu_of(self, name: str) -> str:
        return self._client.workload(name).status.lease.gpu_uuids[0]

    def _free_gpu(self, worker: str) -> str:
        for gpu in self._client.gpus():
            if gpu.worker_name == worker and gpu.lease.state == SLOT_STATE_FREE:
                return gpu.gpu.uuid
        raise DemoError(f"no GPU of {worker} is free")

    def _report(self, name: str) -> CounterReport:
        return read_counter(b"".join(self._client.output(name)).decode(errors="replace"))

    def _wait_counting(self, names: Sequence[str]) -> None:
        """Waits until each counter has advanced."""
        goals = {name: self._report(name).counts + MORE_COUNTS for name in names}
        for name in names:

            def counts_on(name: str = name) -> bool:
                workload = self._client.workload(name)
                if workload.status.HasField("end_time"):
                    raise DemoError(f"{name} ended: {workload_state(workload)}")
                return self._report(name).counts >= goals[name]

            self._fleet.wait_for(counts_on, f"the count of {name}")

    def _show_leases(self) -> None:
        self._fleet.wait_for(self._leases_agree, "the report of the leases")
        self._screen.show_leases(self._client.gpus())

    def _leases_agree(self) -> bool:
        """Whether the reported leases of GPUs and of workloads agree."""
        held = {
            uuid: workload.name
            for workload in self._client.workloads()
            for uuid in workload.status.lease.gpu_uuids
        }
        gpus = self._known_gpus()
        return held == {gpu.gpu.uuid: gpu.workload_name for gpu in gpus if gpu.workload_name}

    def _verify(self) -> dict[str, int]:
        """Reads the output of each counter."""
        reports = {name: self._report(name) for name in COUNTERS}
        for name, report in reports.items():
            gpus = f"{len(report.gpu_uuids)} GPU{'s' * (len(report.gpu_uuids) > 1)}"
            self._screen.say(
                f"  {name}: {report.counts} counts on {gpus}, {report.lost} lost, {report.corrupt} corrupt"
            )
        for name, gpu_uuid in self._moved.items():
            if reports[name].gpu_uuids[-1] != gpu_uuid:
                raise DemoError(
                    f"{name} reports that it runs on {reports[name].gpu_uuids[-1]}, not on {gpu_uuid}"
                )
        return {
            "counters": len(reports),
            "suspends": self._done["suspend"],
            "restores": self._done["restore"],
            "remaps": self._done["remap"],
            "lost": sum(report.lost for report in reports.values()),
            "corrupt": sum(report.corrupt for report in reports.values()),
        }
