"""A digest for each command, of the request that created the command."""

import sqlalchemy as sa
from alembic import op

from leasehold_coordinator.storage.row_digests import renew

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the digests. An earlier request can't be repeated, since its content is unknown."""
    op.add_column("commands", sa.Column("request_digest", sa.LargeBinary))
    renew(op.get_bind(), sa.Table("commands", sa.MetaData(), autoload_with=op.get_bind()))
