"""The web page: it shows a fleet and steers it, as a client of the coordinator's API."""
