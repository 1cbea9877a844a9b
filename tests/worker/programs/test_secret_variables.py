"""Secret variables of workloads on a worker: sealed on arrival, erased at the end."""

from pathlib import Path

import pytest
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED
from leasehold.v1.operation_pb2 import Operation, RunOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandSpec, CommandUpdate
from leasehold_worker.commands.ledger import CommandLedger
from leasehold_worker.errors import StartError
from leasehold_worker.files.secret_key import FILE, open_key
from leasehold_worker.programs.secret_variables import SealError, SecretVariables


def run(**variables: str) -> CommandSpec:
    operation = Operation(run=RunOperation(spec=WorkloadSpec(secret_environment=variables)))
    return CommandSpec(command_id="c-1", workload_id="w-1", operation=operation)


def test_a_value_is_bound_to_its_workload_and_its_name(tmp_path: Path) -> None:
    secrets = SecretVariables(open_key(tmp_path / "keys"))
    command = run(TOKEN="välue", EMPTY="")
    secrets.seal(command)
    spec = command.operation.run.spec
    assert "välue".encode() not in command.SerializeToString()
    assert secrets.reveal("w-1", spec) == {"TOKEN": "välue", "EMPTY": ""}
    assert SecretVariables(open_key(tmp_path / "keys")).reveal("w-1", spec) == {"TOKEN": "välue", "EMPTY": ""}
    with pytest.raises(SealError, match="secret variable"):
        secrets.reveal("w-2", spec)
    with pytest.raises(SealError):
        SecretVariables(bytes(32)).reveal("w-1", spec)


def test_a_command_that_has_ended_has_no_values() -> None:
    ledger = CommandLedger()
    command = run(TOKEN="sealed")
    ledger.receive(CommandFrame(epoch=1, command=command), 1, 0.0)
    (entry,) = ledger.open_entries
    assert entry.command.operation.run.spec.secret_environment["TOKEN"] == "sealed"
    ledger.progress("c-1", "")
    keep, *_ = ledger.finish(CommandUpdate(command_id="c-1", state=COMMAND_STATE_SUCCEEDED))
    assert b"sealed" not in keep.entry.command.SerializeToString()  # type: ignore[union-attr]  # a Keep
    assert command.operation.run.spec.secret_environment["TOKEN"] == "sealed"  # that of the workload


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = open_key(tmp_path / "keys")
    assert (tmp_path / "keys" / FILE).stat().st_mode & 0o777 == 0o600
    assert open_key(tmp_path / "keys") == key
    (tmp_path / "keys" / FILE).write_bytes(b"short")
    with pytest.raises(StartError, match="not a key"):
        open_key(tmp_path / "keys")
