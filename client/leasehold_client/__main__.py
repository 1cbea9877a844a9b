"""The ``leasehold`` command, also as ``python -m leasehold_client``."""

from leasehold_client import interrupts


def main() -> None:
    """Runs the command line, and exits. SIGINT leaves no traceback, whenever it comes."""
    interrupts.end_at_once()
    from leasehold_client.main import main as run_command_line

    try:
        run_command_line()
    finally:
        interrupts.end_at_once()


if __name__ == "__main__":
    main()
