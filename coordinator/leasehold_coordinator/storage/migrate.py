"""Runs Alembic, which migrates the tables of an older release."""

from importlib.resources import files

import alembic.command
import alembic.config
import alembic.util
import sqlalchemy as sa


def migrate(connection: sa.Connection) -> None:
    """Runs the missing migrations of a database.

    Raises:
        SQLAlchemyError: A migration failed, or the database is of a newer release.
    """
    config = alembic.config.Config()
    config.set_main_option("script_location", str(files("leasehold_coordinator") / "storage/migrations"))
    config.attributes["connection"] = connection
    try:
        alembic.command.upgrade(config, "head")
    except alembic.util.CommandError as error:
        raise sa.exc.InvalidRequestError(str(error)) from error
