"""The table of events."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the table."""
    op.create_table(
        "events",
        sa.Column("event_id", sa.String, primary_key=True),
        sa.Column("worker_id", sa.String, nullable=False, index=True),
        sa.Column("workload_id", sa.String, nullable=False, index=True),
        sa.Column("create_time_ns", sa.BigInteger, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
