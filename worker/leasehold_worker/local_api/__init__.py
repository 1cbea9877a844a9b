"""The Unix socket for programs of this host."""
