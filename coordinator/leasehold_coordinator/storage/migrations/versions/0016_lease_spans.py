"""The history of leases."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the table."""
    op.create_table(
        "lease_spans",
        sa.Column("span_id", sa.String, primary_key=True),
        sa.Column("gpu_uuid", sa.String, nullable=False),
        sa.Column("worker_id", sa.String, nullable=False),
        sa.Column("workload_id", sa.String, nullable=False),
        sa.Column("begin_time_ns", sa.BigInteger, nullable=False),
        sa.Column("end_time_ns", sa.BigInteger, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("served_s", sa.BigInteger),
        sa.Column("digest", sa.LargeBinary),
    )
    by_time = ["end_time_ns", "span_id", "begin_time_ns"]
    op.create_index("lease_spans_by_end", "lease_spans", by_time)
    op.create_index("lease_spans_by_gpu", "lease_spans", ["gpu_uuid", *by_time])
    op.create_index("lease_spans_by_worker", "lease_spans", ["worker_id", *by_time])
    op.create_index("lease_spans_by_workload", "lease_spans", ["workload_id", *by_time])
    op.create_index("lease_spans_by_served_s", "lease_spans", ["served_s"])
