"""Each identity has request ids of its own: an id is stored with the identities that sent the request."""

import sqlalchemy as sa
from alembic import op
from leasehold.v1.command_pb2 import Command

from leasehold_coordinator.storage.row_digests import renew

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Puts the actor before each id. A command is found by its actor only."""
    connection = op.get_bind()
    table = sa.Table("commands", sa.MetaData(), autoload_with=connection)
    selected = sa.select(table.c.command_id, table.c.request_id, table.c.record)
    for row in connection.execute(selected.where(table.c.request_id.is_not(None))).all():
        actor = Command.FromString(row.record).actor
        connection.execute(
            sa.update(table)
            .where(table.c.command_id == row.command_id)
            .values(request_id=f"{actor}  {row.request_id}")
        )
    renew(connection, table)
