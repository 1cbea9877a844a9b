"""A digest for each row, which reveals a damaged row."""

import sqlalchemy as sa
from alembic import op

from leasehold_coordinator.storage.row_digests import renew

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the digests. Existing rows count as undamaged."""
    for name in ("workers", "workloads", "commands", "events", "clock"):
        op.add_column(name, sa.Column("digest", sa.LargeBinary))
        renew(op.get_bind(), sa.Table(name, sa.MetaData(), autoload_with=op.get_bind()))
