"""Runs the commands of a page: Python scripts in forks, in which everything is imported already, the rest in bash."""

import functools
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.size import IS_RELEASE
from tests.support.forks import Fork, fork_ranks

_PYTHON = r"python|(?:torchrun|python -m torch\.distributed\.run) --nproc-per-node (?P<ranks>\d+)"
_MAY_FAIL = r"(?P<may_fail> \|\| test \$\? -eq 1)?"
_COMMAND = re.compile(rf"(?:{_PYTHON})(?P<words>(?: (?!torch)(?:[\w./:-]+|'[^']+'))+){_MAY_FAIL}")


class Shell:
    """Runs code as bash would. What it forks has nothing of what its own process does later."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        if os.fork():
            self._file = ours.makefile("rw")
            theirs.close()
            return
        ours.close()
        with theirs.makefile("rw") as requests:
            for line in requests:
                print(_status_of(*json.loads(line)), file=requests, flush=True)
        os._exit(0)

    def __call__(self, code: str) -> None:
        lines, commands = re.sub(r"\\\n +", "", code).splitlines(), list[re.Match[str]]()
        while lines and not IS_RELEASE and (command := _COMMAND.fullmatch(lines[-1])):
            commands.insert(0, command)
            lines.pop()
        if lines:
            subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], check=True)
        for command in commands:
            request = shlex.split(command["words"]), int(command["ranks"] or 0)
            print(json.dumps(request), file=self._file, flush=True)
            status = int(self._file.readline())
            assert status == (1 if command["may_fail"] else 0), f"{command[0]} ended with exit status {status}"


def _status_of(words: Sequence[str], ranks: int) -> int:
    folder = Path(tempfile.mkdtemp())
    work = functools.partial(_run, words)
    forks = fork_ranks(work, ranks, folder / "log") if ranks else [Fork(work, folder / "log")]
    outcomes = [fork.wait() for fork in forks]
    shutil.rmtree(folder)
    for outcome in outcomes:
        print(*outcome.lines, sep="\n", flush=True)
    return max(outcome.status for outcome in outcomes)


def _run(words: Sequence[str]) -> None:
    sys.argv = list(words)
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
