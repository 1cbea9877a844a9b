"""What a user types as messages of the API: GPU names, pairs, policies, hooks."""
