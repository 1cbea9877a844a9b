"""The Unix socket for processes of this host."""
