"""A counter of commits, which reveals a store that has lost commits."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the table of the counter. The first commit inserts its row."""
    op.create_table(
        "commits",
        sa.Column("commits_id", sa.String, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
    )
