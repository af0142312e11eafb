"""Writing training states while the run goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.checkpointing.codec import Encoded
from pytorch_accelerated.checkpointing.state_folder import write_encoded
from pytorch_accelerated.errors import CheckpointError


class BackgroundWriter:
    """Writes state folders, one at a time, in a thread of its own; a run waits only for a copy of the tensors.

    The copies are as large as the state. They are in host memory, pinned for tensors of a CUDA device, and are used
    again for the next state, until `close`. Only the thread of the run may call this.

    Attributes:
        failure: why a state could not be written; `wait` raises it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self._copies: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a state is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, final: str | os.PathLike[str], facts: dict[str, Any], encoded: Mapping[str, Encoded]) -> None:
        """Begin to write a folder as `state_folder.write_encoded` does; what is saved is what is there now.

        Waits until the folder before this one is complete, and for the devices of the tensors.

        Raises:
            CheckpointError: if that folder could not be written.
        """
        self.wait()
        parts = {
            name: Encoded(part.structure, {key: self._copy((name, key), value) for key, value in part.tensors.items()})
            for name, part in encoded.items()
        }
        devices = {tensor.device for part in encoded.values() for tensor in part.tensors.values() if tensor.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        # Not a daemon: a program that ends for whatever reason ends when the state is complete.
        self._thread = threading.Thread(target=self._write, args=(final, facts, parts), name="state writer")
        self._thread.start()

    def wait(self) -> None:
        """Return when everything is on the disk.

        Raises:
            CheckpointError: if it could not be written; said once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self.failure = self.failure, None
        if isinstance(failure, CheckpointError):
            raise failure
        if failure is not None:
            raise CheckpointError(f"A training state could not be written in the background: {failure!r}.") from failure

    def close(self) -> None:
        """`wait`, and let go of the copies."""
        try:
            self.wait()
        finally:
            self._copies.clear()

    def _write(self, final: str | os.PathLike[str], facts: dict[str, Any], parts: Mapping[str, Encoded]) -> None:
        try:
            write_encoded(final, facts, parts)
        except BaseException as error:
            self.failure = error

    def _copy(self, key: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        copy = self._copies.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = copy
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)
