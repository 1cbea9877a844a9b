"""Columns for the acceptance of a command, and for a request to cancel it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the columns. A sent command counts as accepted, since sending it again could execute it twice."""
    op.add_column("commands", sa.Column("accepted", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column(
        "commands", sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.execute("UPDATE commands SET accepted = true WHERE instance_id != ''")
