"""Single ``.pt`` files that ``torch.load(..., weights_only=True)`` can read."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.utils.serialization import config

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError, MissingCheckpointError
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.disk import explained_reading, kind_of, resolved
from pytorch_accelerated.states.publish import explained, replacing

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MARK_OF_FOLDERS = 0x10  # torch reads nothing from such a record, and leaves the tensor's memory as it found it


def save_portable(path: str | os.PathLike[str], contents: dict[str, Any]) -> None:
    """Write `contents` to one file, which appears whole or not at all; an existing file is replaced.

    Creates missing parent folders. To be called by the writing process only.

    Raises:
        CheckpointError: names every value that a weights-only load would refuse, or describes the disk's error.
            Earlier saves are unchanged.
    """
    final = resolved(path)
    complaints = list(_unloadable(contents, "", ()))
    if complaints:
        raise CheckpointError(
            f"{final} would not load with `weights_only=True`, because of:\n  "
            + "\n  ".join(complaints)
            + "\nStore plain values and tensors: an enum's value, a number's `float(...)`, an array's tensor."
        )
    if kind_of(final) == "folder":
        raise CheckpointError(f"{final} is a folder. Give the path of a file, for example {final / 'checkpoint.pt'}.")
    with explained(final), replacing(final) as file:
        output = _Output(file)
        try:
            with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]  # `load_portable` compares them
                torch.save(contents, cast(IO[bytes], output))
        except Exception:
            if output.error is not None:
                raise output.error from None  # torch may have replaced it by its own
            raise


def load_portable(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a file that `save_portable` or ``torch.save`` wrote, with tensors on the CPU.

    No code in the file is run. Sizes and checksums are compared first, so one flipped bit is noticed; files of torch
    before 1.6 have none.

    Raises:
        MissingCheckpointError: a FileNotFoundError, if the file does not exist.
        CheckpointError: if the file cannot be read.
        InvalidCheckpointError: if it is damaged, does not hold a dict, or holds more than plain values and tensors.
    """
    path = Path(path)
    kind = kind_of(path)
    if kind == "folder":
        raise CheckpointError(f"{path} is a folder. A training state is read with `load_training_state`.")
    if kind != "file":
        near = ", ".join(sorted(child.name for child in path.parent.glob("*.pt"))) or "none"
        raise MissingCheckpointError(f"There is no file {path}. Files ending in '.pt' in its folder: {near}.")
    try:
        with explained_reading(path), open(path, "rb") as file:
            _compare_checksums(file)
            contents = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(contents, dict):
            raise ValueError(f"it holds a {type(contents).__name__}, not the dict of a checkpoint")
        return contents
    except CheckpointError:
        raise
    except Exception as error:  # torch raises errors of any class
        cause = error.__context__ or error  # torch's own is followed by pages of advice
        raise InvalidCheckpointError(
            f"{path} cannot be loaded ({type(cause).__name__}: {str(cause).partition('. ')[0]}). If the file is "
            "damaged, use another one. If it holds more than plain values and tensors, it could run code: if you trust "
            "it, load it with `torch.load` yourself and save its tensors again."
        ) from error


def _compare_checksums(file: IO[bytes]) -> None:
    """Compare the records of an archive with their sizes and checksums, which torch itself does not."""
    if file.read(4) == b"PK\x03\x04":
        with zipfile.ZipFile(file) as archive:
            folders = (entry.filename for entry in archive.infolist() if entry.external_attr & _MARK_OF_FOLDERS)
            changed = archive.testzip() or next(folders, None)
        if changed is not None:
            raise ValueError(f"its record {changed!r} was changed")
    file.seek(0)


def _unloadable(value: Any, path: str, parents: tuple[Any, ...]) -> Iterator[str]:
    """The parts of `value` that a weights-only load refuses. Values of unknown types are saved and loaded to see."""
    if type(value) in _PLAIN or type(value) in _PLAIN_TENSORS:
        return
    if type(value) not in (list, tuple, set, dict, OrderedDict):
        try:
            with tempfile.TemporaryFile(buffering=0) as single:
                torch.save(value, single)
                single.seek(0)
                torch.load(single, weights_only=True)
        except Exception:
            yield f"{path or 'the contents'}: {type(value).__module__}.{type(value).__qualname__}"
    elif any(value is parent for parent in parents):
        yield f"{path}: contains itself"
    else:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unloadable(key, f"the key {key!r} of {path or 'the contents'}", (*parents, value))
            yield from _unloadable(item, f"{path}[{key!r}]" if path else str(key), (*parents, value))


class _Output:
    """A file as ``torch.save`` wants it, with every write going through `disk`."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            disk.write(self._file, data)
        except BaseException as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Nothing to do: every write goes to the file at once."""
