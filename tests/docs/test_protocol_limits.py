"""The times that docs/protocol.md allows are those that every room allows."""

from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner
from google.protobuf.duration_pb2 import Duration
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold_client.cli.verb import lock_timeout_option, timeout_option
from leasehold_coordinator.core.field_rules import check_duration
from leasehold_coordinator.errors import FleetError
from leasehold_worker.errors import OperationError
from leasehold_worker.planning.workload_checks import lock_timeout_s

WEEK_S = 7 * 86_400


def test_a_lock_timeout_of_a_week_is_allowed_and_no_longer_one() -> None:
    week, longer = Duration(seconds=WEEK_S), Duration(seconds=WEEK_S + 1)
    assert lock_timeout_s(SuspendOperation(lock_timeout=week)) == WEEK_S
    with pytest.raises(OperationError, match=f"at most {WEEK_S}"):
        lock_timeout_s(SuspendOperation(lock_timeout=longer))
    check_duration("lock_timeout", week)
    with pytest.raises(FleetError, match=f"at most {WEEK_S}"):
        check_duration("lock_timeout", longer)


@pytest.mark.parametrize("option", [lock_timeout_option, timeout_option])
def test_the_command_line_takes_a_week_at_most(option: Callable[..., Any]) -> None:
    command = click.command(option(lambda **values: click.echo(values)))
    assert CliRunner().invoke(command, [name_of(command), str(WEEK_S)]).exit_code == 0
    refused = CliRunner().invoke(command, [name_of(command), str(WEEK_S + 1)])
    assert refused.exit_code == 2
    assert "from 0.001s to 7d" in refused.output


def name_of(command: click.Command) -> str:
    return command.params[0].opts[0]
