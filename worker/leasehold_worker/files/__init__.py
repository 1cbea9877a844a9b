"""Files and directories on a host with untrusted users."""
