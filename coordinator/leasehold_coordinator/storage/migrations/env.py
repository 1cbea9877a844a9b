"""Alembic's entry point: runs the migrations on the store's connection."""

from alembic import context

from leasehold_coordinator.storage.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
