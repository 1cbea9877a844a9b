"""The client of the coordinator."""
