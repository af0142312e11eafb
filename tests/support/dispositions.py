"""What signals do, whatever has started the tests."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_signals() -> Iterator[None]:
    """Signals do here, and in processes started here, what they do in a process started from a terminal.

    A child inherits what its parent ignores or blocks. A shell ignores SIGINT in its background jobs, and batch systems
    ignore others. A test that sends a signal would fail there, so it is wrapped in this; the rest of the suite leaves
    Ctrl-C as it is. Main thread only.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
    }
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
