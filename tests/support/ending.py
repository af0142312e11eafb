"""Ends processes that a test has started."""

import contextlib
import time

import psutil


def kill_with_children(process_id: int) -> None:
    """Kill a process and all it has started, and return when none of them runs any more.

    Killing its process group would miss the ranks, because torchrun gives each of them a session of its own.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process_id)
        family = [process, *process.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself in the meantime
                member.kill()
        while any(is_running(member.pid) for member in family):
            time.sleep(0.01)


def is_running(process_id: int) -> bool:
    """Whether a process can still do anything: one that has ended may wait for its parent to ask how."""
    try:
        return bool(psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
