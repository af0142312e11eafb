"""Writing training states in the background while the run continues."""

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
    """Writes state folders, one at a time, in its own thread; the run waits only while the tensors are copied.

    The copies are as large as the state. They are in host memory (pinned for tensors of a CUDA device) and are reused
    for the next state, until `close`. Only the thread of the run may call the methods.

    Attributes:
        failure: why a state could not be written; `wait` raises it.
        after_each: functions that the thread calls when a state is complete, before the next one starts.
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
        """Start `state_folder.write_encoded` with a copy of the tensors as they are now.

        First waits until the previous folder is complete. `ranks` need a process group that nothing else uses.

        Raises:
            CheckpointError: if the previous folder could not be written.
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
        # Not a daemon: the program should not exit before the state is complete.
        self._thread = threading.Thread(target=self._write, args=(final, facts, parts, ranks), name="state writer")
        self._thread.start()

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            CheckpointError: if a state could not be written. Each failure is raised once.
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
        """`wait`, then free the copies."""
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
        """Copy this rank's parts of sharded tensors with torch's stager, which can make such tensors in host memory."""
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
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        if copy is None or (copy.shape, copy.stride(), copy.dtype) != (shape, stride, dtype):
            # With the strides of the tensor: another order of dimensions would make the copy two to four times slower.
            copy = torch.empty_strided(shape, stride, dtype=dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = copy
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)
