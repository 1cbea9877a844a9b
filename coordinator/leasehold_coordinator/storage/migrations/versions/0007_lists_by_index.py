"""Indexes for the order of lists, which avoid sorting all rows."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds an index for the order of each list."""
    op.create_index("workloads_by_time", "workloads", ["create_time_ns"])
    op.create_index("commands_by_time", "commands", ["create_time_ns"])
    op.drop_index("ix_commands_workload_id", "commands")
    op.create_index("commands_by_workload_and_time", "commands", ["workload_id", "create_time_ns"])
    for column in ("worker_id", "workload_id"):
        op.drop_index(f"ix_events_{column}", "events")
        op.create_index(f"events_by_{column.removesuffix('_id')}", "events", [column, "event_id"])
