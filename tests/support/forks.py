"""Processes forked from one in which everything is already imported, so that each takes a fraction of a second.

For scripts: a fork of pytest would be a second pytest.
"""

import dataclasses
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.ending import end_without_teardown


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        status: what a shell would show: 128 + n if signal n has ended it.
        lines: its output.
    """

    status: int
    lines: list[str]


class Fork:
    """A process that does `work`. Exceptions end it as they would end a script.

    Args:
        work: its work.
        log: the file that it prints to.
        env: environment variables.

    Attributes:
        pid: its process id.
    """

    def __init__(self, work: Callable[[], object], log: Path, **env: str) -> None:
        self._log = log
        gc.freeze()  # otherwise an ending process would first visit all objects it shares with this one
        self.pid = os.fork()
        if self.pid:
            return
        os.environ.update(env)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent shell may have started this without one
        sys.stdout = log.open("w", buffering=1)
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                end_without_teardown(error.code)
            raise  # to the top of the script
        sys.stdout.flush()
        os._exit(0)

    def read_lines(self) -> list[str]:
        """The output so far."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def wait(self) -> Outcome:
        """Wait for its end."""
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return Outcome(code if code >= 0 else 128 - code, self.read_lines())


def fork_ranks(work: Callable[[], object], world_size: int, log: Path) -> list[Fork]:
    """One fork per rank; the ranks find each other. Each prints to a file beside `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": f"{world_size}", "LOCAL_WORLD_SIZE": f"{world_size}"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return [
        Fork(work, log.with_suffix(f".{rank}"), RANK=f"{rank}", LOCAL_RANK=f"{rank}", **shared)
        for rank in range(world_size)
    ]
