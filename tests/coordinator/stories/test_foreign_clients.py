"""Clients in other languages: they know the protos, and nothing of Leasehold's Python."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path
from shutil import which
from typing import Any, Final

import pytest
from google.rpc import code_pb2, error_details_pb2
from leasehold.v1 import command_pb2
from leasehold_client.config import credentials_directory

from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.long

ROOT: Final = Path(__file__).resolve().parents[3]
LIBRARIES: Final = ROOT / ".cache/foreign_client"
"""What ``make foreign-client`` installs. The test uses no other."""

PAGE: Final = ROOT / "docs/api.md"
BUF: Final = Path(sys.executable).parent / "buf"


def carry_out_the_first(worker: ScriptedWorker) -> None:
    """The command of the first workload that is created, as a worker does it."""
    command = worker.command("run").command
    for state in (command_pb2.COMMAND_STATE_ACCEPTED, command_pb2.COMMAND_STATE_SUCCEEDED):
        worker.update(command.command_id, state)


@pytest.mark.skipif(not which("node"), reason="no Node.js here: install nodejs")
@pytest.mark.skipif(not (LIBRARIES / "installed").exists(), reason="run `make foreign-client` first")
def test_a_client_of_node(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    working = threading.Thread(target=carry_out_the_first, args=[worker])
    working.start()
    done = subprocess.run(
        [
            "node",
            str(Path(__file__).parents[1] / "foreign_client/client.js"),
            coordinator.address,
            str(ROOT / "protos"),
            str(Path(code_pb2.__file__).parents[2]),
            str(credentials_directory()),
        ],
        cwd=LIBRARIES,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    working.join()
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["worker"]["name"], found["worker"]["state"]) == ("alpha", "WORKER_STATE_CONNECTED")
    assert found["gpus"] == [[0, "GPU-alpha-0"], [1, "GPU-alpha-1"]]
    assert found["same_command"]
    assert found["command"] == ["COMMAND_STATE_SUCCEEDED", "run"]
    assert found["resume_token"]
    assert {"EVENT_KIND_WORKER_CONNECTED", "EVENT_KIND_COMMAND_ENDED"} <= set(found["events"])
    assert found["unknown"]["code"] == "NOT_FOUND"
    assert found["unknown"]["google.rpc.ErrorInfo"]["reason"] == "UNKNOWN_WORKLOAD"
    assert found["negative"]["code"] == "INVALID_ARGUMENT"
    assert found["negative"]["google.rpc.ErrorInfo"]["metadata"]["field"] == "spec.resources.gpu_count"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the credentials where a coordinator creates them."""
    directory = tmp_path / ".local/state/leasehold"
    directory.parent.mkdir(parents=True)
    directory.symlink_to(credentials_directory())
    return tmp_path


@pytest.mark.parametrize("language", ["python", "js", "bash"])
def test_a_call_of_the_page(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, home: Path, language: str
) -> None:
    if language == "js" and not (which("node") and (LIBRARIES / "installed").exists()):
        pytest.skip("no Node.js or no libraries here: install nodejs and run `make foreign-client`")
    worker.welcome()
    calls = PAGE.read_text().partition("\n## Calls\n")[2].partition("\n## ")[0]
    (program,) = re.findall(rf"^```{language}\n(.*?)^```$", calls, re.MULTILINE | re.DOTALL)
    program = program.replace("127.0.0.1:7400", coordinator.address)
    interpreter = {"python": [sys.executable, "-c"], "js": ["node", "-e"], "bash": ["bash", "-ec"]}[language]
    variables = {
        **os.environ,
        "HOME": str(home),
        "NODE_PATH": str(LIBRARIES / "node_modules"),
        "PATH": f"{BUF.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*interpreter, program],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if language == "bash":  # the answer in JSON, which omits the slot 0
        uuids = [one["gpu"]["uuid"] for one in json.loads(done.stdout)["gpus"]]
        assert uuids == ["GPU-alpha-0", "GPU-alpha-1"]
    else:
        assert done.stdout.splitlines() == ["alpha 0 GPU-alpha-0", "alpha 1 GPU-alpha-1"]


def test_the_published_descriptors_serve_a_call(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    worker.welcome()
    directory = credentials_directory()
    header = f"authorization: Bearer {(directory / 'client.token').read_text().strip()}"
    schema = str(files("leasehold") / "descriptors.binpb")
    address = f"https://{coordinator.address}/leasehold.v1.FleetService/ListWorkers"
    options = ["--schema", schema, "--cacert", str(directory / "ca.pem"), "--header", header]
    arguments = [str(BUF), "curl", "--protocol", "grpc", *options, address]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"][0]["name"] == "alpha"


def buf_curl(coordinator: CoordinatorProcess, method: str, request: str) -> subprocess.CompletedProcess[str]:
    directory = credentials_directory()
    token = (directory / "client.token").read_text().strip()
    header = f"authorization: Bearer {token}"
    secrets = ["--cacert", str(directory / "ca.pem"), "--header", header, "--reflect-header", header]
    address = f"https://{coordinator.address}/leasehold.v1.{method}"
    arguments = [str(BUF), "curl", "--protocol", "grpc", *secrets, "--data", request, address]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


def test_buf_curl_by_reflection(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    worker.welcome()
    listed = buf_curl(coordinator, "FleetService/ListGpus", '{"worker": "alpha"}')
    assert listed.returncode == 0, listed.stderr
    gpus = json.loads(listed.stdout)["gpus"]
    assert [gpu["gpu"]["uuid"] for gpu in gpus] == ["GPU-alpha-0", "GPU-alpha-1"]
    refused = buf_curl(coordinator, "WorkloadService/GetWorkload", '{"workload": "nobody"}')
    assert refused.returncode != 0
    status = json.loads(refused.stderr)
    assert status["code"] == "not_found"
    (detail,) = [each for each in status["details"] if each["type"] == "google.rpc.ErrorInfo"]
    data = base64.b64decode(detail["value"] + "==")
    assert error_details_pb2.ErrorInfo.FromString(data).reason == "UNKNOWN_WORKLOAD"
