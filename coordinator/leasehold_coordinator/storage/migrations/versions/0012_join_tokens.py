"""Join tokens, and the workers that joined by them."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "join_tokens",
        sa.Column("join_token_id", sa.String, primary_key=True),
        sa.Column("secret_digest", sa.LargeBinary, nullable=False),
        sa.Column("joins", sa.String, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.LargeBinary),
    )
    op.create_table(
        "worker_bindings",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("worker_id", sa.String, nullable=False),
        sa.Column("gpu_uuids", sa.String, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.LargeBinary),
    )
