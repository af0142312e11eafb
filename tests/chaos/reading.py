"""Reads hostile folders in a process whose memory is limited, and which reports everything else that it does.

A script. Its arguments: a folder with the folders ``0/state``, ``1/state``, ... and how many there are.
"""

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing.verify import find_state
from pytorch_accelerated.errors import CheckpointError
from tests.chaos.saved_runs import trained

ROOM_BYTES = 200 * 10**6
FORBIDDEN = {"os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename", "os.mkdir", "os.symlink"}
FORBIDDEN |= {"subprocess.Popen", "pickle.find_class", "marshal.loads", "socket.connect", "ctypes.dlopen", "exec"}

done: list[str] = []
is_watching = False


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not is_watching:
        return
    if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        done.append(f"opens {arguments[0]} to write")
    elif event in FORBIDDEN:
        done.append(f"{event} {arguments}")


def main() -> None:
    global is_watching
    place, count = Path(sys.argv[1]), int(sys.argv[2])
    trainer = trained(1)
    state = place / "undamaged"
    trainer.save_training_state(state)
    trainer.load_training_state(state)  # what is imported at first use is there now
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.addaudithook(watch)
    refused = 0
    for number in range(count):
        folder = place / str(number) / "state"
        is_watching = True
        with contextlib.suppress(CheckpointError):
            find_state(folder)
            trainer.load_training_state(folder)
            refused -= 1
        is_watching = False
        refused += 1
    assert not done, "\n".join(done)
    print(f"{refused} refused")


if __name__ == "__main__":
    main()
