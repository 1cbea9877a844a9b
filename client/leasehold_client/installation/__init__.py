"""Installation of the daemons as services of systemd."""
