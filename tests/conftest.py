"""What holds for every test, and for the processes that tests start."""

import os
import sys

# Hundreds of our processes are started: compiling our modules anew in each would take most of their starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
