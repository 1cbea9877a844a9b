"""The database: its tables, its migrations, and group commit."""
