"""Reads of outputs that a workload does not have."""

from pathlib import Path
from typing import cast

import pytest
from leasehold.v1 import errors_pb2
from leasehold.worker.v1.session_pb2 import ReadOutput
from leasehold_worker.errors import OperationError
from leasehold_worker.session.output_query import read_output
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.workload import CLAIM, EXEC, RUN

from tests.worker.workloads.test_invariants import workload


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        (RUN, "can't be read (no file): check "),
        (EXEC, "not started by `leasehold run`, and writes where its own caller reads, such as the terminal"),
        (CLAIM, "has no output here: it was not started by `leasehold run`"),
    ],
)
async def test_a_program_that_the_worker_did_not_start_has_no_output_here(
    tmp_path: Path, origin: int, told: str
) -> None:
    one = workload(origin=origin, output_path=tmp_path / "output.log")
    with pytest.raises(OperationError) as raised:
        await read_output(cast("Workloads", {"w": one}), ReadOutput(workload_id="w"))
    assert raised.value.reason == errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE
    assert told in raised.value.message
