"""Retention counts the time that the store has been served, from the end of each row."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the columns and the clock. Ended rows count as if they had ended at the migration."""
    op.create_table(
        "clock",
        sa.Column("clock_id", sa.String, primary_key=True),
        sa.Column("served_s", sa.BigInteger),
    )
    for table in ("workloads", "commands", "events"):
        op.add_column(table, sa.Column("served_s", sa.BigInteger))
        op.create_index(f"{table}_by_served_s", table, ["served_s"])
    op.execute("UPDATE events SET served_s = 0")
    op.execute("UPDATE workloads SET served_s = 0 WHERE ended")
    op.execute("UPDATE commands SET served_s = 0 WHERE ended")
