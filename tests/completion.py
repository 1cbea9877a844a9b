"""A ``leasehold`` that gives a coordinator a minute to complete names, as on a machine that is busy."""

import sys
from typing import Final

_CODE: Final = """\
from leasehold_client.cli import name_cache
name_cache.FETCH_LIMIT_S = 60.0
from leasehold_client.__main__ import main
main()
"""
PATIENT: Final = (sys.executable, "-c", _CODE)
