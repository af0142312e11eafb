"""Nobody waits for the disk: a process that dies loses nothing that it has written; only a power cut would."""

import os


def install() -> None:
    """Make `os.fsync` check its argument only, but for ``make chaos``."""
    if os.environ.get("CHAOS_SIZE") != "release":
        os.fsync = os.fstat  # type: ignore[assignment]
