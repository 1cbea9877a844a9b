"""``leasehold demo``: real processes suspended, moved and restored on simulated GPUs."""

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import click
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec

from leasehold_client.client import Client
from leasehold_client.demo_counts import CounterReport, read_counter
from leasehold_client.demo_fleet import DemoError, DemoFleet, demo_fleet
from leasehold_client.errors import LeaseholdError
from leasehold_client.exit_codes import EXIT_INTERRUPTED, fail

COUNTERS: Final = 6
COUNTER_BYTES: Final = "8MiB"
COUNTER_PROGRAM: Final = Path(__file__).resolve().parents[2] / "examples/counter.py"


@click.command()
@click.option("--keep", is_flag=True, help="Leave it running at the end, until Ctrl-C.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Folder for stores and logs, kept.")
def demo(keep: bool, folder: Path | None) -> None:
    """Suspend, move and restore six counting processes on two simulated GPU hosts.

    It checks from their own output that no count was lost and no byte is wrong, and prints one line of JSON.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if not COUNTER_PROGRAM.exists():
            raise DemoError(f"the demonstration needs {COUNTER_PROGRAM.name} of a checkout: run it from one")
        with _folder(folder) as chosen, demo_fleet(chosen) as fleet, Client(fleet.address) as client:
            story = Story(fleet, client)
            summary = story.tell()
            click.echo(json.dumps(summary))
            if keep:
                _wait_for_interrupt(fleet)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except LeaseholdError as error:
        fail(error)
    sys.exit(0 if summary["lost"] == summary["corrupt"] == 0 else 1)


@final
class Story:
    """What happens, in order."""

    def __init__(self, fleet: DemoFleet, client: Client) -> None:
        self._fleet = fleet
        self._client = client
        self._done = {"suspend": 0, "restore": 0, "remap": 0}
        self._moved: dict[str, str] = {}
        self._shown: list[str] = []

    def tell(self) -> dict[str, int]:
        """Runs the demonstration, and returns its figures.

        Raises:
            LeaseholdError: A step failed, or a counter is not where it should be.
        """
        names = [f"counter-{number}" for number in range(1, COUNTERS + 1)]
        self._say(f"two workers with four simulated GPUs each; {COUNTERS} counters start")
        for index, name in enumerate(names):
            self._run(name, "alpha" if index < 3 else "beta")
        self._wait_counting(names)
        self._show_leases()

        self._say("counter-1 and counter-2 are suspended: their GPUs are free for others")
        first_gpu = self._gpu_of("counter-1")
        self._finish(self._client.suspend("counter-1"), "counter-1")
        self._finish(self._client.suspend("counter-2"), "counter-2")
        self._show_leases()

        self._say("another workload starts on the freed GPUs")
        self._run("newcomer", "alpha", gpu_count=2)
        self._wait_counting(["newcomer"])
        self._show_leases()

        self._say("counter-1 wakes elsewhere; its old GPU is taken")
        self._finish(self._client.restore("counter-1"), "counter-1")
        if self._gpu_of("counter-1") == first_gpu:
            raise DemoError("counter-1 was restored on a GPU that somebody else holds")
        self._moved["counter-1"] = self._gpu_of("counter-1")
        self._show_leases()

        self._say("counter-4 is moved while it runs, and the coordinator is killed and replaced meanwhile")
        target = self._free_gpus("beta")[0]
        command = self._client.remap("counter-4", [(self._gpu_of("counter-4"), target)])
        self._fleet.replace_coordinator()
        self._finish(command, "counter-4")
        self._moved["counter-4"] = target
        self._show_leases()

        self._say("the newcomer stops, and counter-2 wakes")
        self._finish(self._client.stop("newcomer"), "newcomer")
        self._finish(self._client.restore("counter-2"), "counter-2")
        self._wait_counting(names)
        self._show_leases()
        return self._judge(names)

    def _run(self, name: str, worker: str, gpu_count: int = 1) -> None:
        arguments = [sys.executable, str(COUNTER_PROGRAM), "--bytes", COUNTER_BYTES, "--interval-s", "0.1"]
        spec = WorkloadSpec(arguments=arguments, resources=Resources(gpu_count=gpu_count))
        _, command = self._client.run(spec, name=name, worker=worker)
        self._finish(command, name)

    def _finish(self, command: Command, name: str) -> None:
        """Waits for a command, which must succeed."""
        command = self._client.wait(command)
        kind = command.operation.WhichOneof("kind") or ""
        if command.state != COMMAND_STATE_SUCCEEDED:
            raise DemoError(f"{kind} of {name} failed: {command.error.message}\n{self._fleet.log_tails()}")
        seconds = command.result.duration.ToTimedelta().total_seconds()
        self._say(f"  {kind} {name}: {seconds:.2f} s on the worker")
        for pair in command.result.applied_pairs:
            stays = "stays" if pair.old_uuid == pair.new_uuid else "moves"
            self._say(f"    pair {pair.old_uuid} -> {pair.new_uuid} ({stays})")
        if kind in self._done:
            self._done[kind] += 1

    def _gpu_of(self, name: str) -> str:
        return self._client.workload(name).status.lease.gpu_uuids[0]

    def _free_gpus(self, worker: str) -> list[str]:
        gpus = [gpu for gpu in self._client.gpus() if gpu.worker_name == worker]
        return [gpu.gpu.uuid for gpu in gpus if gpu.lease.state == SlotState.SLOT_STATE_FREE]

    def _report(self, name: str) -> CounterReport:
        return read_counter(b"".join(self._client.output(name)).decode(errors="replace"))

    def _wait_counting(self, names: Sequence[str]) -> None:
        """Waits until each has counted on from where it is now."""
        goals = {name: self._report(name).counts + 3 for name in names}
        for name, goal in goals.items():
            self._fleet.wait_for(
                lambda name=name, goal=goal: self._report(name).counts >= goal,  # type: ignore[misc]
                f"counting of {name}",
            )

    def _show_leases(self) -> None:
        """Prints a line of leases per worker, where anything has changed."""
        self._fleet.wait_for(self._leases_agree, "the report of the leases")
        lines: dict[str, list[str]] = {}
        for gpu in self._client.gpus():
            lines.setdefault(gpu.worker_name, []).append(f"{gpu.gpu.slot}:{gpu.workload_name or '-':<10}")
        table = [f"  {worker:<6} {'  '.join(cells)}" for worker, cells in lines.items()]
        if table != self._shown:
            self._shown = table
            for line in table:
                self._say(line)

    def _leases_agree(self) -> bool:
        """Whether the workers' loads show the leases that the workloads report."""
        held = {
            uuid: workload.name
            for workload in self._client.workloads()
            for uuid in workload.status.lease.gpu_uuids
        }
        gpus = self._client.gpus()
        return bool(gpus) and held == {gpu.gpu.uuid: gpu.workload_name for gpu in gpus if gpu.workload_name}

    def _judge(self, names: Sequence[str]) -> dict[str, int]:
        reports = {name: self._report(name) for name in names}
        for name, report in reports.items():
            self._say(
                f"  {name}: {report.counts} counts on {len(report.gpu_uuids)} GPUs, "
                f"{report.lost} lost, {report.corrupt} corrupt"
            )
        for name, gpu_uuid in self._moved.items():
            if reports[name].gpu_uuids[-1] != gpu_uuid:
                raise DemoError(f"{name} says that it runs on {reports[name].gpu_uuids[-1]}, not {gpu_uuid}")
        return {
            "counters": len(reports),
            "suspends": self._done["suspend"],
            "restores": self._done["restore"],
            "remaps": self._done["remap"],
            "lost": sum(report.lost for report in reports.values()),
            "corrupt": sum(report.corrupt for report in reports.values()),
        }

    def _say(self, text: str) -> None:
        click.echo(text, err=True)


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="leasehold-demo-") as made:
            yield Path(made)
    else:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoError(f"the folder {wanted} can't be used: {error.strerror}; choose another") from error
        yield wanted.resolve()


def _wait_for_interrupt(fleet: DemoFleet) -> None:
    click.echo(
        f"It runs on. Talk to it with LEASEHOLD_COORDINATOR={fleet.address} leasehold get workloads; "
        "Ctrl-C ends it.",
        err=True,
    )
    ended = threading.Event()
    while not ended.wait(0.5):
        fleet.check()


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
