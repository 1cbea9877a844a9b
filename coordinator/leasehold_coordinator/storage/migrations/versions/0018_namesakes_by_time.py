"""An index that finds the newest workloads of a name without a sort of all of them."""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replaces the index."""
    op.create_index("workloads_by_name_and_time", "workloads", ["name", "create_time_ns"])
    op.drop_index("ix_workloads_name", "workloads")
