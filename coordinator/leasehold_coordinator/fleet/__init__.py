"""The present state of workers and workloads, their sessions, and the watches of clients."""
