"""The coordinator: it knows the fleet, keeps the commands, and serves clients."""

__version__ = "0.1.0"
