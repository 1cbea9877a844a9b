"""Client certificates, their revocations, and the highest time of the host's clock."""

import sqlalchemy as sa
from alembic import op

from leasehold_coordinator.storage.row_digests import renew

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the tables and the column."""
    op.create_table(
        "certificates",
        sa.Column("serial", sa.String, primary_key=True),
        sa.Column("identity", sa.String, nullable=False),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False),
        sa.Column("predecessor", sa.String, nullable=False),
        sa.Column("authority", sa.String, nullable=False),
        sa.Column("not_before_ns", sa.BigInteger, nullable=False),
        sa.Column("not_after_ns", sa.BigInteger, nullable=False),
        sa.Column("certificate", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.LargeBinary),
    )
    op.create_index("certificates_by_expiry", "certificates", ["not_after_ns"])
    op.create_table(
        "revocations",
        sa.Column("subject", sa.String, primary_key=True),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("create_time_ns", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.LargeBinary),
    )
    op.add_column("clock", sa.Column("highest_time_ns", sa.BigInteger))
    renew(op.get_bind(), sa.Table("clock", sa.MetaData(), autoload_with=op.get_bind()))
