"""Waiting for a GPU."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """While this is open, an operation that waits for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
