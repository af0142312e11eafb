"""Writing training states while the run goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.checkpointing.codec import Encoded
from pytorch_accelerated.checkpointing.state_folder import write_encoded
from pytorch_accelerated.errors import CheckpointError

if TYPE_CHECKING:
    from pytorch_accelerated.processes.ranks import Ranks


class BackgroundWriter:
    """Writes state folders, one at a time, in a thread of its own; a run waits only for a copy of the tensors.

    The copies are as large as the state. They are in host memory, pinned for tensors of a CUDA device, and are used
    again for the next state, until `close`. Only the thread of the run may call this.

    Attributes:
        failure: why a state could not be written; `wait` raises it.
        after_each: called in that thread when a state is complete; the next one is begun after that.
    """

    def __init__(self) -> None:
        self.after_each: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self._copies: dict[tuple[str, str], torch.Tensor] = {}
        self._stager: Any = None

    @property
    def is_busy(self) -> bool:
        """Whether a state is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(
        self,
        final: str | os.PathLike[str],
        facts: dict[str, Any],
        encoded: Mapping[str, Encoded],
        ranks: Ranks | None = None,
    ) -> None:
        """Begin to write a folder as `state_folder.write_encoded` does; what is saved is what is there now.

        Waits until the folder before this one is complete, and for the devices of the tensors. `ranks` need a channel
        that nobody else uses.

        Raises:
            CheckpointError: if that folder could not be written.
        """
        self.wait()
        parts = {
            name: Encoded(part.structure, {key: self._copy((name, key), value) for key, value in part.tensors.items()})
            for name, part in encoded.items()
        }
        self._copy_sharded(encoded, parts)
        devices = {tensor.device for part in encoded.values() for tensor in part.tensors.values() if tensor.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        # Not a daemon: a program that ends for whatever reason ends when the state is complete.
        self._thread = threading.Thread(target=self._write, args=(final, facts, parts, ranks), name="state writer")
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
            if self._stager is not None:
                self._stager.close()
                self._stager = None

    def _write(self, *arguments: Any) -> None:
        try:
            write_encoded(*arguments)
            for call in self.after_each:
                call()
        except BaseException as error:
            self.failure = error

    def _copy_sharded(self, encoded: Mapping[str, Encoded], parts: Mapping[str, Encoded]) -> None:
        """Copies of what this rank has of sharded tensors; torch can make tensors of that kind in host memory."""
        sharded = {name: part.sharded for name, part in encoded.items() if part.sharded}
        if not sharded:
            return
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            on_cuda = any(tensor.is_cuda for tensors in sharded.values() for tensor in tensors.values())
            options = StagingOptions(
                use_pinned_memory=on_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_cuda,
            )
            self._stager = DefaultStager(options)
        for name, tensors in self._stager.stage(sharded).items():
            parts[name].sharded.update(tensors)

    def _copy(self, key: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        copy = self._copies.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = copy
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)
