"""``leasehold validate`` on hosts where everything holds, and where something does not."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from leasehold_simgpu import SimulatedHost
from leasehold_worker.diagnostics.validate_verb import command

from tests.conformance.conftest import why_no_gpu
from tests.grids import grid
from tests.prefork import COMMAND_LINE, Forked, run
from tests.worker.conftest import Counter


def make_host(tmp_path: Path, **options: Any) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", **options)


def validate(
    host: SimulatedHost | None, *arguments: str, code: int = 0, alone: bool = True, patch: str = ""
) -> dict[str, Any]:
    variables = {**os.environ, **(host.environment() if host else {})}
    options = ["--bytes", "1MiB", "-o", "json"]
    program = f"{patch}\n{COMMAND_LINE}"
    done = run(program, ["validate", *options, *arguments], env=variables, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if host is not None and alone:
        assert host.processes() == (), "nothing is left running"
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.long
def test_with_two_equal_gpus_everything_is_proved(tmp_path: Path) -> None:
    host = make_host(tmp_path, gpus=2)
    document = validate(host)
    assert [step["name"] for step in document["steps"]] == [
        *("start", "suspend, first time", "restore, first time"),
        *("suspend, second time", "restore, second time", "move", "move back"),
    ]
    assert document["error"] is None
    expected = ("PCI bus id", "its first CUDA_VISIBLE_DEVICES")
    assert [note for note in document["notes"] if not any(text in note for text in expected)] == []
    assert host.gpus[1].uuid in document["steps"][5]["proved"]
    assert set(document["steps"][5]["gigabytes_per_s"]) == {"checkpoint", "restore"}
    assert document["driver_version"] == host.driver_version


@pytest.mark.parametrize(
    "options", [pytest.param({"gpus": 1}, marks=pytest.mark.long), {"gpus": 2, "chip": ["H100", "L4"]}]
)
def test_without_an_equal_gpu_nothing_is_moved(tmp_path: Path, options: dict[str, Any]) -> None:
    document = validate(make_host(tmp_path, **options))
    assert len(document["steps"]) == 5
    assert document["notes"][0].startswith("not moved: no other NVIDIA H100")


@pytest.mark.long
def test_a_driver_without_pairs_is_validated_as_far_as_it_goes(tmp_path: Path) -> None:
    document = validate(make_host(tmp_path, gpus=2, driver_version="575.57.08"))
    assert len(document["steps"]) == 5
    assert "13.0 is needed" in document["notes"][0]


@pytest.mark.long
def test_the_gpu_can_be_named(tmp_path: Path) -> None:
    host = make_host(tmp_path, gpus=2)
    assert validate(host, "--gpu", host.gpus[1].uuid)["gpu_uuid"] == host.gpus[1].uuid
    unknown = "GPU-00000000-0000-0000-0000-000000000000"
    error = validate(host, "--gpu", unknown, code=2)["error"]
    assert error.startswith(f"{unknown} is not a GPU of this host, which has {host.gpus[0].uuid}")


SHORT_PROOFS = """
from leasehold_worker.diagnostics import validate
from leasehold_worker.agent.config import WorkerConfig
validate.WorkerConfig = lambda **settings: WorkerConfig(proof_timeout_s=1.0, **settings)
"""
"""What is not as it must be is not waited for as long as for a real NVML."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "fault", "steps", "expected"),
    [
        pytest.param("checkpoint", {"error": 801}, 1, "UNSUPPORTED_STATE", marks=pytest.mark.long),
        pytest.param("checkpoint", {"keep_memory": True}, 1, "MEMORY_NOT_FREED", marks=pytest.mark.long),
        pytest.param("checkpoint", {"skip": True}, 1, "its state is LOCKED", marks=pytest.mark.long),
        pytest.param("restore", {"error": 2}, 2, "MEMBER_WEDGED", marks=pytest.mark.long),
        pytest.param("unlock", {"skip": True}, 2, "its state is LOCKED", marks=pytest.mark.long),
        ("restore", {"ignore_gpu_pairs": True}, 5, "REMAP_NOT_APPLIED"),
    ],
)
def test_what_does_not_hold_is_named(
    tmp_path: Path, call: str, fault: dict[str, Any], steps: int, expected: str
) -> None:
    host = make_host(tmp_path, gpus=2)
    host.set_fault(call, **fault)
    document = validate(host, code=1, patch=SHORT_PROOFS)
    assert expected in document["error"]
    assert len(document["steps"]) == steps


def test_a_host_that_can_not(tmp_path: Path) -> None:
    assert "no usable CUDA driver" in validate(None, code=1)["error"]
    full = make_host(tmp_path, gpus=1)
    full.hog(0, full.gpus[0].memory_bytes)
    assert "has 0 B free" in validate(full, code=1)["error"]


@pytest.mark.long
def test_a_gpu_that_others_use_is_shared(
    tmp_path: Path, start_counter: Callable[..., Counter], host: SimulatedHost
) -> None:
    assert start_counter(gpu=1).process.poll() is None
    document = validate(host, "--gpu", host.gpus[1].uuid, alone=False)
    assert document["error"] is None
    assert len(document["steps"]) == 7


@pytest.mark.long
def test_a_driver_that_hides_what_processes_take(tmp_path: Path) -> None:
    host = make_host(tmp_path, gpus=1)
    host.set_readings(0, hides_process_memory=True)
    assert validate(host)["error"] is None


@pytest.mark.long
@pytest.mark.parametrize("number", grid([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
@pytest.mark.parametrize("call", grid(["checkpoint", "restore"], "restore"))
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, call: str) -> None:
    host = make_host(tmp_path, gpus=1)
    host.set_fault(call, delay_s=0.5)
    with started(host, tmp_path) as process:
        wait_until(lambda: calls(host, call) > 0, process)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert said(tmp_path).read_text() == f"leasehold: interrupted by {number.name}, nothing is verified\n"
    assert host.processes() == ()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_program_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    host = make_host(tmp_path, gpus=1)
    host.set_fault("lock", delay_s=30)
    with started(host, tmp_path) as process:
        wait_until(lambda: len(host.processes()) > 1, process)
    wait_until(lambda: host.processes() == ())


def calls(host: SimulatedHost, call: str) -> int:
    return sum(process.calls[call] for process in host.processes())


@contextmanager
def started(host: SimulatedHost, tmp_path: Path) -> Iterator[Forked]:
    """A validation that runs, and is killed at the end where it still does."""
    (tmp_path / "temporary").mkdir()
    with said(tmp_path).open("w") as errors:
        process = Forked(
            COMMAND_LINE,
            ["validate", "--bytes", "1MiB"],
            env={**os.environ, **host.environment(), "TMPDIR": str(tmp_path / "temporary")},
            stdout=errors,
            stderr=errors,
        )
    yield process
    process.kill()
    process.wait(30)


def said(tmp_path: Path) -> Path:
    """What such a validation writes."""
    return tmp_path / "said"


def wait_until(condition: Callable[[], bool], process: Forked | None = None) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.01)


def test_wrong_usage_is_exit_2() -> None:
    for arguments in (["--bytes", "much"], ["--gpu", "first"], ["--bytes", "1"]):
        done = run(COMMAND_LINE, ["validate", *arguments], env=os.environ, timeout=60)
        assert done.returncode == 2, done
        assert arguments[1] in done.stderr


@pytest.mark.gpu
def test_everything_holds_on_the_gpus_of_this_host() -> None:
    if reason := why_no_gpu():
        pytest.skip(f"no real GPU: {reason}")
    assert validate(None, "--bytes", "1GiB")["error"] is None


@pytest.mark.parametrize(
    ("size", "message"),
    [("8G", "invalid size '8G': write bytes, or a number"), ("4KB", "4KB is too small: give 4 KiB or more")],
)
def test_an_invalid_size_is_refused_with_the_rule(size: str, message: str) -> None:
    refused = CliRunner().invoke(command, ["--bytes", size])
    assert refused.exit_code == 2
    assert message in refused.output
