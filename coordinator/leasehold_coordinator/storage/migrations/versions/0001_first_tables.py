"""The first tables: workers, workloads and commands."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("hello", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "workloads",
        sa.Column("workload_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, index=True),
        sa.Column("worker_id", sa.String, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("create_time_ns", sa.BigInteger, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_index("workloads_by_end_and_time", "workloads", ["ended", "create_time_ns"])
    op.create_table(
        "commands",
        sa.Column("command_id", sa.String, primary_key=True),
        sa.Column("request_id", sa.String, unique=True),
        sa.Column("workload_id", sa.String, nullable=False, index=True),
        sa.Column("worker_id", sa.String, nullable=False),
        sa.Column("instance_id", sa.String, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("create_time_ns", sa.BigInteger, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_index("commands_by_end_and_time", "commands", ["ended", "create_time_ns"])
