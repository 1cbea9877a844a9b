"""The ``leasehold`` command, also as ``python -m leasehold_client``."""

import gc

from leasehold_client import interrupts


def main() -> None:
    """Runs the command line and exits. SIGINT never prints a traceback."""
    interrupts.end_at_once()
    from leasehold_client.main import main as run_command_line

    try:
        run_command_line()
    finally:
        gc.freeze()  # skips the last garbage collection, a seventh of a verb's time
        interrupts.end_at_once()


if __name__ == "__main__":
    main()
