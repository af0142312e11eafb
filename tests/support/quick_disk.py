"""Skips waiting for the disk: a process that dies loses nothing it has written; only a power failure would."""

import os


def install() -> None:
    """Make `os.fsync` only check its argument, except in ``make chaos``."""
    if os.environ.get("CHAOS_SIZE") != "release":
        os.fsync = os.fstat  # type: ignore[assignment]
