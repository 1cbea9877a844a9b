"""Whether a command was accepted, and whether somebody asked to cancel it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the columns. What was sent counts as accepted: to send it again could do it twice."""
    op.add_column("commands", sa.Column("accepted", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column(
        "commands", sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.execute("UPDATE commands SET accepted = true WHERE instance_id != ''")
