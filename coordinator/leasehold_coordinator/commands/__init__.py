"""From a request to a stored command, and from there to a worker."""
