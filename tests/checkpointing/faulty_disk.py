"""A disk that fails, or a process that dies, at a chosen operation of a save."""

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from pytorch_accelerated.states import disk

Operation = Callable[..., Any]


def wrap_operations(wrap: Callable[[str, Operation], Operation]) -> None:
    """From here on, each operation of the disk, by name, is what `wrap` makes of it. For processes that end soon."""
    for name in disk.OPERATIONS:
        setattr(disk, name, wrap(name, getattr(disk, name)))


def count_until_death(*, dies_at: int | None) -> Callable[[], int]:
    """What returns how many operations there have been from here on; this process is killed right before `dies_at`."""
    done = 0
    one_at_a_time = threading.Lock()

    def counted(name: str, operation: Operation) -> Operation:
        def run(*args: Any) -> Any:
            nonlocal done
            with one_at_a_time:
                if done == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
                return operation(*args)

        return run

    wrap_operations(counted)
    return lambda: done


class Killed(BaseException):
    """The process is gone: from here on nothing reaches the disk, clean-up included."""


class FaultyDisk:
    """Counts the operations that reach the disk, and makes one of them fail.

    Args:
        fails_at: number of that operation, from 0; None for none.
        how: ``error`` is one failed operation, after which the disk works again; ``death before`` and ``death after``
            end the process around the operation; ``torn`` ends it in the middle of a write.
    """

    def __init__(
        self, fails_at: int | None = None, how: Literal["error", "death before", "death after", "torn"] = "error"
    ) -> None:
        self.fails_at = fails_at
        self.how = how
        self.operations: list[str] = []
        self.is_dead = False
        self._one_at_a_time = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator["FaultyDisk"]:
        with pytest.MonkeyPatch.context() as patch:
            for name in disk.OPERATIONS:
                patch.setattr(disk, name, self._wrapped(name, getattr(disk, name)))
            yield self

    def _wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self._one_at_a_time:
                return act(*args)

        def act(*args: Any) -> Any:
            if self.is_dead:
                raise Killed
            is_the_one = len(self.operations) == self.fails_at
            self.operations.append(name)
            if not is_the_one:
                return operation(*args)
            if self.how == "error":
                raise OSError(errno.ENOSPC, "No space left on device")
            self.is_dead = True
            if self.how == "death after":
                result = operation(*args)
                if name == "create_file":
                    result.close()  # as the operating system does when a process ends
            if self.how == "torn" and name == "write":
                file, data = args
                operation(file, memoryview(data)[: len(data) // 2])
            raise Killed

        return run


def count_operations(save: Callable[[], Any]) -> int:
    """How many operations `save` needs when nothing fails."""
    with FaultyDisk().installed() as counting:
        save()
    return len(counting.operations)
