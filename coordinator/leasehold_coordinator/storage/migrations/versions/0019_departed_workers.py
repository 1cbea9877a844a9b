"""Whether the last session of a worker ended with the worker's goodbye."""

import sqlalchemy as sa
from alembic import op

from leasehold_coordinator.storage.row_digests import renew

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column. Its value is unknown for earlier rows, which counts as no goodbye."""
    op.add_column("workers", sa.Column("has_left", sa.Boolean))
    renew(op.get_bind(), sa.Table("workers", sa.MetaData(), autoload_with=op.get_bind()))
