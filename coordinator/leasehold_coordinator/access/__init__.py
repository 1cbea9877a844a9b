"""Identities of callers, roles of methods, keys and tokens."""
