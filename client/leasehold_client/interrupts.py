"""SIGINT raises KeyboardInterrupt while a verb runs, and ends the process at any other time."""

import signal


def end_at_once() -> None:
    """Restores the default action of SIGINT, unless SIGINT is ignored.

    Python's own handler raises KeyboardInterrupt. Imports, destructors and the interpreter's shutdown would
    print it as a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_in_verb() -> None:
    """Makes SIGINT raise KeyboardInterrupt again, after :func:`end_at_once`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
