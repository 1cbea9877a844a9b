"""A summary of the worker's journal as JSON, for ``leasehold support-bundle``, which runs this module.

It changes nothing, and has no program, no variable and no request of a workload.
"""

import json
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from google.protobuf.message import DecodeError
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.workload_pb2 import MemberState, WorkloadState
from leasehold.worker.v1.session_pb2 import CommandUpdate

from leasehold_worker.commands.journal_file import connect
from leasehold_worker.commands.journal_records import WorkloadRecord, decode_workload
from leasehold_worker.files.state_directory import StateDirectory

WORKLOADS_LIMIT: Final = 2_000
"""Most workloads of a summary. A worker keeps 256 ended ones."""


def summarize(path: Path) -> dict[str, object]:
    """The summary of a journal.

    Raises:
        sqlite3.Error: The file can't be read.
        msgspec.DecodeError, DecodeError, ValueError: A row is damaged.
    """
    with closing(connect(path, "ro")) as connection:
        (form,) = connection.execute("PRAGMA user_version").fetchone()
        commands = Counter[str]()
        for (update,) in connection.execute("SELECT command_update FROM commands"):
            commands[CommandState.Name(CommandUpdate.FromString(update).state)] += 1
        (newest_s,) = connection.execute("SELECT max(received_s) FROM commands").fetchone()
        (intents,) = connection.execute("SELECT count(*) FROM intents").fetchone()
        rows = connection.execute("SELECT record FROM workloads LIMIT ?", (WORKLOADS_LIMIT,))
        workloads = [_workload(decode_workload(record)) for (record,) in rows]
    return {
        "format": form,
        "commands_by_state": dict(commands),
        "newest_command": datetime.fromtimestamp(newest_s, UTC).isoformat() if newest_s else None,
        "unfinished_operations": intents,
        "workloads": workloads,
    }


def _workload(record: WorkloadRecord) -> dict[str, object]:
    return {
        "workload_id": record.workload_id,
        "state": WorkloadState.Name(record.state),
        "generation": record.generation,
        "start_time": record.start_time.isoformat(),
        "gpu_uuids": list(record.lease.gpu_uuids) if record.lease else [],
        "members": [
            {"pid": member.identity.pid, "state": MemberState.Name(member.state)} for member in record.members
        ],
    }


def main(directory: Path) -> None:
    """Prints the summary of the journal in a state directory, or exits with the reason."""
    path = StateDirectory(directory).journal_path
    try:
        print(json.dumps(summarize(path)))  # noqa: T201 - the output of this program
    except (sqlite3.Error, msgspec.DecodeError, DecodeError, ValueError) as error:
        sys.exit(f"{path} can't be summarized: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
