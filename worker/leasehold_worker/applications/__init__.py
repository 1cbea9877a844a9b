"""Applications that checkpoint their own state."""
