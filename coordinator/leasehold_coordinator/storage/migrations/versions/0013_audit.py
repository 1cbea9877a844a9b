"""The audit, and the anchor of its chain."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.String, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("served_s", sa.BigInteger),
        sa.Column("digest", sa.LargeBinary),
    )
    op.create_index("audit_by_identity", "audit", ["identity", "number"])
    op.create_table(
        "audit_anchor",
        sa.Column("anchor_id", sa.String, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.LargeBinary),
    )
