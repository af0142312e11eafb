"""Default signal handling, no matter what has started the tests."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_signals() -> Iterator[None]:
    """Give signals the default effects, here and in child processes, as in a process started from a terminal.

    A child inherits ignored and blocked signals from its parent. A shell ignores SIGINT in its background jobs, and
    batch systems ignore other signals. A test that sends a signal would fail there, so it uses this context; the rest
    of the tests leave Ctrl-C alone. Main thread only.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
