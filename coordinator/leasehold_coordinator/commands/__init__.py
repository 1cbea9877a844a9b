"""Turns requests into stored commands, and sends commands to workers."""
