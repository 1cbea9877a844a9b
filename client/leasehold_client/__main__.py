"""``python -m leasehold_client`` is the ``leasehold`` command."""

from leasehold_client.main import main

main()
