"""The timeout for other ranks, and the error when one of them is lost."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pytorch_accelerated.errors import ConfigurationError, LostPeerError

# gloo raises plain RuntimeErrors, which can only be recognised by their text.
_WORDS_OF_GLOO = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "gloo/transport",
)


def limit_of_waiting(seconds: Any) -> timedelta | None:
    """`timeout` in the form that torch expects.

    Raises:
        ConfigurationError: if it is not a positive number of seconds.
    """
    if seconds is None:
        return None
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < timedelta.max.total_seconds()):
        raise ConfigurationError(
            f"`timeout` is {seconds!r}: pass the number of seconds that a process may wait for the others, more than "
            "0, or None for torch's default."
        )
    return timedelta(seconds=seconds)


def is_lost_contact(error: BaseException) -> bool:
    """Whether `error` means that the processes of a group have lost contact."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(words in str(error) for words in _WORDS_OF_GLOO)


def lost_peer_error(error: BaseException, *, rank: int, size: int, updates: int, newest: Path | None) -> LostPeerError:
    """The error to raise instead of torch's `error`.

    Args:
        error: the error that ended the run on this rank.
        rank: the number of this process.
        size: the number of processes.
        updates: the number of finished updates.
        newest: the newest complete training state, if one is known.
    """
    reason = str(error).partition("\n")[0]
    if newest is None:
        restart = "No training state was saved, so the run starts over"
    else:
        restart = f"The newest complete state is {newest}, from which the run resumes"
    return LostPeerError(
        f"Rank {rank} of {size} lost another rank after update {updates} ({reason}). That process has exited, is "
        "unreachable, or took longer than the timeout; its own output may say why. "
        f"{restart} when all processes are restarted."
    )
