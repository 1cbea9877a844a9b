"""The coordinator process: settings, start and end."""
