"""Looking at the disk without taking what cannot be read for what is not there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pytorch_accelerated.errors import CheckpointError

Kind = Literal["file", "folder", "other"]


def kind_of(path: Path) -> Kind | None:
    """What there is at `path`, links followed; None only if there is nothing.

    Raises:
        CheckpointError: if nobody can tell: a parent may not be searched, links go round in a circle, or the path can
            be none.
    """
    with explained_reading(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return None
        except ValueError as error:  # a zero byte in it
            raise OSError(0, str(error)) from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def children_of(folder: Path) -> list[Path]:
    """What there is in a folder, by name.

    Raises:
        CheckpointError: if it cannot be read.
    """
    with explained_reading(folder):
        return sorted(folder.iterdir())


@contextlib.contextmanager
def explained_reading(path: Path) -> Iterator[None]:
    """Turns what the operating system says into a `CheckpointError`.

    A missing file is one, too: the caller has seen it, or has been told that it is there.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Check the path, and that this user may read it and search the "
            "folders above it."
        ) from error
