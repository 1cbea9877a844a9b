"""What both daemons tell systemd, on a socket as systemd gives it to them."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest
from leasehold_worker.host.processes import catches, identify

from tests.integration.fleets import TIMEOUT_S, Fleet, make_fleet
from tests.prefork import executed

SHOW = "import os; print({name: os.environ.get(name) for name in ('NOTIFY_SOCKET', 'WATCHDOG_USEC')})"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue[str]]:
    """What a service manager is told that wants a sign of life each 0.2 s."""
    messages = Queue[str]()

    def receive() -> None:
        while message := receiver.recv(1000):
            messages.put(message.decode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        thread = threading.Thread(target=receive)
        thread.start()
        yield messages
        receiver.shutdown(socket.SHUT_RD)
        thread.join(TIMEOUT_S)


def expect(told: Queue[str], state: str) -> None:
    """Waits until a state is told, and refuses unknown ones."""
    while (message := told.get(timeout=TIMEOUT_S)) != state:
        assert message in {"READY=1", "STOPPING=1", "WATCHDOG=1"}


def test_a_coordinator_says_when_it_serves_lives_and_ends(
    told: Queue[str], tmp_path: Path, is_mutual: bool
) -> None:
    with make_fleet(tmp_path, is_mutual=is_mutual) as fleet:
        expect(told, "READY=1")
        expect(told, "WATCHDOG=1")
        fleet.processes["coordinator"].send_signal(signal.SIGTERM)
        expect(told, "STOPPING=1")


@pytest.mark.long
def test_a_worker_says_when_it_serves_lives_and_ends(fleet: Fleet, told: Queue[str], tmp_path: Path) -> None:
    fleet.start_worker("beta", 1)
    expect(told, "READY=1")
    expect(told, "WATCHDOG=1")
    fleet.cli("run", "--worker", "beta", "--gpus", "1", "--name", "show", "--", sys.executable, "-c", SHOW)
    fleet.cli("wait", "show", "--for", "ended")
    output = b"".join(fleet.client.output("show")).decode()
    assert output.strip() == str({"NOTIFY_SOCKET": None, "WATCHDOG_USEC": None})
    fleet.end("beta", signal.SIGTERM)
    expect(told, "STOPPING=1")


@pytest.mark.long
def test_a_stopped_worker_shows_no_life(empty_fleet: Fleet, told: Queue[str]) -> None:
    empty_fleet.start_worker("alpha", 1)
    process = empty_fleet.processes["alpha"]
    expect(told, "READY=1")
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Empty):
            last_message(told)
    finally:
        process.send_signal(signal.SIGCONT)


def last_message(told: Queue[str]) -> None:
    """Waits for messages until none has come for ten intervals.

    Raises:
        Empty: None has come.
    """
    while True:
        told.get(timeout=2)


def end_in_good_order(fleet: Fleet, name: str, number: signal.Signals) -> None:
    """Ends a daemon by a signal, once it has a handler for SIGTERM."""
    process = fleet.processes[name]
    daemon = identify(process.pid)
    assert daemon is not None
    while not catches(daemon, signal.SIGTERM):
        time.sleep(0.01)
    fleet.end(name, number)
    assert process.returncode == 0


@pytest.mark.long
def test_a_hangup_ends_both_daemons_in_good_order(empty_fleet: Fleet) -> None:
    """A closed terminal sends SIGHUP to what was started in it."""
    empty_fleet.start_worker("alpha", 1)
    for name in ("alpha", "coordinator"):
        end_in_good_order(empty_fleet, name, signal.SIGHUP)


@pytest.mark.long
def test_a_second_hangup_ends_nothing_at_once(empty_fleet: Fleet) -> None:
    """A closed terminal may send two, by its shell and by the kernel. The workload takes 1 s to end."""
    empty_fleet.start_worker("alpha", 1, settings='stop_workloads = "stop"\n')
    slow = "import signal, time\ndef end(*_):\n    time.sleep(1)\n    exit()\nsignal.signal(15, end)"
    slow += "\nprint('up', flush=True)\nwhile True:\n    time.sleep(1)"
    program = [sys.executable, "-c", slow]
    empty_fleet.cli("run", "--worker", "alpha", "--name", "slow", "--", *program)
    empty_fleet.wait(lambda: b"".join(empty_fleet.client.output("slow")) == b"up\n")
    process = empty_fleet.processes["alpha"]
    process.send_signal(signal.SIGHUP)
    empty_fleet.wait(lambda: "SIGHUP: stopping" in empty_fleet.log("alpha"))
    empty_fleet.end("alpha", signal.SIGHUP)
    assert process.returncode == 0
    assert "second signal" not in empty_fleet.log("alpha")


@pytest.mark.long
def test_nohup_keeps_both_daemons(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with executed(), make_fleet(tmp_path, is_mutual=False) as fleet:
            fleet.start_worker("alpha", 1)
            for name in ("alpha", "coordinator"):
                fleet.processes[name].send_signal(signal.SIGHUP)
                end_in_good_order(fleet, name, signal.SIGTERM)
                assert "SIGHUP: stopping" not in fleet.log(name)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
