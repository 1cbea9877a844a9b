"""Commits are counted, so that a store that has lost some is noticed."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the counter. The first commit makes its row."""
    op.create_table(
        "commits",
        sa.Column("commits_id", sa.String, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
    )
