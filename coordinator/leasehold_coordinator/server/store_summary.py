"""A summary of the coordinator's store as JSON, for ``leasehold support-bundle``, which runs this module.

It changes nothing, and has numbers and times only.
"""

import json
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from leasehold_coordinator.storage.schema import METADATA


def summarize(path: Path) -> dict[str, object]:
    """The rows of each table, of which so many have ended, with the newest time.

    Raises:
        sqlite3.Error: The file can't be read.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        stored = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        tables: dict[str, object] = {}
        for table in METADATA.sorted_tables:
            if table.name not in stored:
                continue
            ended = "sum(ended)" if "ended" in table.c else "NULL"
            newest = "max(create_time_ns)" if "create_time_ns" in table.c else "NULL"
            query = f"SELECT count(*), {ended}, {newest} FROM {table.name}"  # noqa: S608 - names of the schema
            count, ended_count, newest_ns = connection.execute(query).fetchone()
            tables[table.name] = {
                "rows": count,
                **({} if ended_count is None else {"ended": ended_count}),
                **(
                    {}
                    if newest_ns is None
                    else {"newest": datetime.fromtimestamp(newest_ns / 1e9, UTC).isoformat()}
                ),
            }
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return {"size_bytes": pages * page_bytes, "tables": tables}


def main(path: Path) -> None:
    """Prints the summary of a store, or exits with the reason."""
    try:
        print(json.dumps(summarize(path)))  # noqa: T201 - the output of this program
    except (sqlite3.Error, ValueError, OverflowError, OSError) as error:
        sys.exit(f"{path} can't be summarized: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
