"""Indexes of the rows with large records, which are deleted apart from others."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the indexes."""
    condition = sa.text("length(record) >= 4096")
    for table in ("workloads", "commands"):
        op.create_index(
            f"{table}_large_by_served_s",
            table,
            ["served_s"],
            sqlite_where=condition,
            postgresql_where=condition,
        )
