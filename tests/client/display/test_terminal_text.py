"""Text of others on a terminal: nothing that a terminal obeys, everything that people read."""

import grpc
import pytest
from leasehold.v1 import lease_pb2
from leasehold.v1.fleet_service_pb2 import ListGpusResponse
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import ForeignProcess, GpuLease
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold_client.display.terminal_text import safe_cell, safe_text

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, refuse

HOSTILE = "\x1b]0;owned\x07\x9b2J\r\x00\x7f\u202e\u2066\u2028\ud800"


@pytest.mark.parametrize("text", ["plain", "two\nlines\tand a tab", "naïve 東京 🙂", ""])
def test_what_people_read_stays(text: str) -> None:
    assert safe_text(text) == text


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert safe_text(HOSTILE).isprintable()
    assert safe_text(HOSTILE).startswith("\\x1b]0;owned\\x07\\x9b2J\\r\\x00\\x7f\\u202e")
    assert safe_cell("a\nb\tc") == "a\\nb\\tc"


def test_a_hostile_process_reaches_no_terminal(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    foreign = ForeignProcess(pid=7, user="\x1b[31mmallory", command="a\x1b[2Jb")
    lease = GpuLease(state=lease_pb2.SLOT_STATE_FOREIGN, foreign_processes=[foreign])
    gpu = FleetGpu(worker_name="alpha\x1b[0m", gpu=Gpu(uuid="GPU-1", name="H\x9b1m"), lease=lease)
    scripted.answers["ListGpus"] = lambda request, context: ListGpusResponse(gpus=[gpu])
    table = leasehold("get", "gpus").stdout
    assert "\x1b" not in table
    assert "\x9b" not in table
    assert "a\\x1b[2Jb" in table
    assert "\x1b" not in leasehold("get", "gpus", "-o", "json").stdout


def test_a_hostile_refusal_reaches_no_terminal(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.ABORTED, "WORKLOAD_BUSY\x1b[1m", "held by \x1b[2Jmallory"
    )
    error = leasehold("suspend", "one").stderr
    assert "held by \\x1b[2Jmallory" in error
    assert "\x1b" not in error
