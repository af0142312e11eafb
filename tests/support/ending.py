"""Ends processes of tests: started ones, and the one that it is called in."""

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

import psutil


def kill_with_children(process_id: int) -> None:
    """Kill a process and all its descendants, and return when none of them runs any more.

    Killing its process group would miss the ranks, because torchrun starts each of them in a separate session.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process_id)
        family = [process, *process.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                member.kill()
        while any(is_running(member.pid) for member in family):
            time.sleep(0.01)


def is_running(process_id: int) -> bool:
    """Whether a process is still running: an ended one may exist until its parent waits for it."""
    try:
        return bool(psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_without_teardown(status: int = 0) -> NoReturn:
    """What Python does at the end of a script but for tearing down all modules: a fork would copy them first."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
