"""The asynchronous client of the coordinator, for asyncio.

The modules are the source of :mod:`leasehold_client.coordinator`: ``python client/generate.py`` writes each
of them there without ``async`` and ``await``. Only ``connection.py`` has a twin that is written by hand.
"""

import leasehold_client.coordinator  # noqa: F401  # sets the log level of gRPC before any module imports gRPC
