"""What SIGINT does to the ``leasehold`` command: it raises KeyboardInterrupt in a verb, and nowhere else."""

import signal


def end_at_once() -> None:
    """Lets SIGINT end the process, as the kernel does by default. A SIGINT that is ignored stays ignored.

    Python's own handler raises KeyboardInterrupt, which imports, destructors and the end of the interpreter
    print as a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_in_verb() -> None:
    """Lets SIGINT raise KeyboardInterrupt again, after :func:`end_at_once`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
