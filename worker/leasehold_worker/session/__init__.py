"""The stream to the coordinator."""
