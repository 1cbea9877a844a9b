"""Runs a benchmark, and fails if the benchmark leaves a process or a temporary file behind.

python -m bench.checked bench/pool.py --rounds 10
python -m bench.checked -m bench.fleet --workers 1000
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import environment


def main() -> None:
    """Runs the command line, which takes the arguments of Python. Exits with the status of the benchmark."""
    folder = Path(tempfile.mkdtemp(prefix="lh-bench-", dir="/tmp"))
    (folder / "t").mkdir()
    variables = {**os.environ, environment.MARK: str(folder), "TMPDIR": str(folder / "t")}
    status = subprocess.run([sys.executable, *sys.argv[1:]], env=variables, check=False).returncode
    left = environment.leftovers(folder)
    for line in left:
        print(f"left behind: {line}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(status or bool(left))


if __name__ == "__main__":
    main()
