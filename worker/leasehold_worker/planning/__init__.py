"""What an operation would do, and what forbids it."""
