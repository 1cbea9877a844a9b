"""Children of the worker that run a module of it in an interpreter of their own.

The interpreter ignores PYTHON* variables and site-packages. So it imports the standard library and the
worker's own modules only.
"""

import sys
from pathlib import Path
from typing import Final

import leasehold_worker

_ROOT: Final = str(Path(leasehold_worker.__file__).absolute().parents[1])


def module_command(module: str) -> list[str]:
    """The command that runs the ``main`` of a module, which finds its arguments in ``sys.argv[1:]``."""
    code = f"import sys; sys.path.append({_ROOT!r}); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]
