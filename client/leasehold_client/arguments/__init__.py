"""Converts arguments of the command line to messages of the API: GPU names, pairs, policies, hooks."""
