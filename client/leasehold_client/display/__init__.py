"""What the command prints: tables, JSON documents, progress."""
