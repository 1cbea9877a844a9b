"""The client of the coordinator."""

import os

# gRPC would log failed handshakes, which errors tell, and the ends of idle connections.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
