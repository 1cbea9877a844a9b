"""Plans: the effects of an operation, and the reasons that forbid it."""
