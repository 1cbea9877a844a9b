"""Deletions of workloads are remembered, since workers report ended workloads again."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the table."""
    op.create_table(
        "deletions",
        sa.Column("workload_id", sa.String, primary_key=True),
        sa.Column("worker_id", sa.String, nullable=False),
        sa.Column("served_s", sa.BigInteger),
        sa.Column("digest", sa.LargeBinary),
    )
    op.create_index("deletions_by_served_s", "deletions", ["served_s"])
