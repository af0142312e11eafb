"""Tracebacks of errors in a user's code: which frames are the user's, and how ours are left out.

`docs/design/breaking.md` has the reasons.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

_OURS = str(Path(__file__).parents[1]) + os.sep
_DATA = str(Path(_OURS, "data")) + os.sep
_HANDLER = str(Path(_OURS, "callbacks", "handler.py"))


def fold_frames(error: BaseException) -> None:
    """Take our frames out of the traceback of an error that other code raised within a call of the trainer.

    Kept are the call itself, the user's frames, and all frames below the user's first one. An error that our own code
    raises keeps every frame. A debugger sees the frames that are kept.
    """
    entries = list(_entries(error))
    if not entries or _is_ours(entries[-1].tb_frame):
        return
    calls = [at for at, each in enumerate(entries) if not each.tb_frame.f_code.co_flags & inspect.CO_GENERATOR]
    users = [at for at, each in enumerate(entries) if _is_users(each.tb_frame)]
    first = users[0] if users else 0
    call = calls[0] if calls else 0
    latest = entries[call]
    for at in range(call + 1, len(entries)):
        if at >= first and not _is_ours(entries[at].tb_frame):
            latest.tb_next = entries[at]
            latest = entries[at]


def users_frame(error: BaseException) -> str | None:
    """The user's innermost frame within a call of the trainer; None if there is none, or the traceback ends with it."""
    entries = list(_entries(error))
    users = [each for each in entries if _is_users(each.tb_frame)]
    if not users or users[-1] is entries[-1]:
        return None
    code, line = users[-1].tb_frame.f_code, users[-1].tb_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f'File "{code.co_filename}", line {line}, in {code.co_name}' + (f": {text}" if text else "")


def place_of(error: BaseException) -> str | None:
    """What called the code that raised an error, where no hook did: a dataset, or the event of a callback."""
    entries = list(_entries(error))
    if not entries or _is_ours(entries[-1].tb_frame):
        return None  # our own errors explain themselves
    ours = [at for at, each in enumerate(entries) if _is_ours(each.tb_frame)]
    frame: FrameType = entries[ours[-1]].tb_frame
    if frame.f_code.co_filename.startswith(_DATA):
        return "fetching a batch"
    handlers = [each.tb_frame for each in entries if each.tb_frame.f_code.co_filename == _HANDLER]
    if handlers and "event" in handlers[-1].f_locals:
        owner = getattr(handlers[-1].f_locals.get("method"), "__self__", None)
        return f"the callback {type(owner).__name__}, at `{handlers[-1].f_locals['event']}`"
    return None


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not (_is_ours(frame) or name.startswith((*_libraries(), "<frozen")))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """The folders of Python's library and of installed packages. Asking for them imports a module."""
    return tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
