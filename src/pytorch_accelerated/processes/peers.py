"""What a rank says when it waited in vain for the others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pytorch_accelerated.errors import ConfigurationError, LostPeerError

# gloo raises plain RuntimeErrors, which can be told by their text alone.
_WORDS_OF_GLOO = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "gloo/transport",
)


def limit_of_waiting(seconds: Any) -> timedelta | None:
    """`timeout` as torch takes it.

    Raises:
        ConfigurationError: if it is no positive number of seconds.
    """
    if seconds is None:
        return None
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < timedelta.max.total_seconds()):
        raise ConfigurationError(
            f"`timeout` is {seconds!r}: give the seconds that a process may wait for the others, more than 0, or None "
            "for torch's limit."
        )
    return timedelta(seconds=seconds)


def is_lost_contact(error: BaseException) -> bool:
    """Whether the processes of a group can't hear each other any more."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(words in str(error) for words in _WORDS_OF_GLOO)


def lost_peer_error(error: BaseException, *, rank: int, size: int, updates: int, newest: Path | None) -> LostPeerError:
    """What to raise in place of torch's `error`.

    Args:
        error: what ended the run on this rank.
        rank: of this process.
        size: the number of processes.
        updates: those that were finished.
        newest: the newest complete training state that is known of.
    """
    reason = str(error).partition("\n")[0]
    if newest is None:
        restart = "No training state was saved, so the run starts again from the beginning"
    else:
        restart = f"The newest complete state is {newest}, from which the run resumes"
    return LostPeerError(
        f"Rank {rank} of {size} lost another rank after update {updates} ({reason}). That process has ended, cannot be "
        "reached, or kept this one waiting for longer than the timeout; its own output may say why. "
        f"{restart} when all processes are started again."
    )
