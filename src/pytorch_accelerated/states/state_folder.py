"""Nested state as a folder and back, and writing it in the background while the run continues.

Combines `codec`, `publish` and `verify`. Each rank writes its pieces of sharded tensors to one safetensors
file, under names that say where they belong (``model/0.weight[4:7,0:5]``), and rank 0 lists the tensors in
``shards.json``. Any number of ranks can read them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import is_sharded, own_part, shard_of
from pytorch_accelerated.states.codec import (
    DTYPE_NAMES,
    DTYPES,
    Encoded,
    chunks,
    decode,
    dump_json,
    load_json,
    read_tensors,
)
from pytorch_accelerated.states.layout import PARTS, SHARDS_FILE, SHARDS_NAME, FileEntry, Manifest
from pytorch_accelerated.states.publish import StagedFolder, begin
from pytorch_accelerated.states.verify import open_verified, read_manifest, tensors_of_file

MakeTarget = Callable[[str, torch.Size, torch.dtype], torch.Tensor]
Place = list[tuple[int, int]]
"""Start and end of a piece in each dimension."""


def write_encoded(
    final: str | os.PathLike[str] | StagedFolder,
    facts: dict[str, Any],
    encoded: Mapping[str, Encoded],
    ranks: Ranks | None = None,
) -> None:
    """Write a state folder. It appears complete or not at all; an existing state is replaced.

    Args:
        final: the folder to write, which all ranks must be able to reach; or one that `publish.begin` has made, whose
            files become a part of the state.
        facts: plain values that `verify.read_manifest` finds without reading the parts.
        encoded: by name, what `encode` returned; each part becomes ``<name>.json`` and ``<name>.safetensors``, and each
            rank writes its own pieces of sharded tensors.
        ranks: the ranks that have pieces of sharded tensors, all of which must call this. None: nothing is sharded.

    Raises:
        CheckpointError: describes the disk's error. Earlier saves are unchanged.
    """
    # The first rank is here alone if nothing is sharded; a message to the others would wait for ever.
    on_first: Callable[[Callable[[], Any]], Any] = (lambda work: work()) if ranks is None else ranks.do_on_first
    staged: StagedFolder = final if isinstance(final, StagedFolder) else on_first(lambda: begin(final))
    try:
        others = on_first(staged.add_files) if staged is final else []
        shards = [] if ranks is None else _write_shards(ranks, staged, encoded)

        def write_parts() -> None:  # comes last, when all ranks have their pieces on the disk
            contents: dict[str, Iterable[bytes | memoryview]] = {}
            for name, part in encoded.items():
                contents[f"{name}.json"] = [dump_json(part.structure)]
                contents[f"{name}.safetensors"] = chunks(part.tensors)  # copied to the host one at a time
            files = staged.write_files(contents.items())
            staged.commit({**facts, PARTS: list(encoded)} if others else facts, [*shards, *others, *files])

        on_first(write_parts)
    except BaseException:
        if ranks is None or ranks.is_first:
            staged.abort()
        raise


def read_state(
    folder: str | os.PathLike[str],
    parts: Collection[str] | None = None,
    make_target: MakeTarget | None = None,
    without: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts and the parts of a state folder, bit for bit as they were written.

    Args:
        folder: a state folder, as `verify.find_state` returns it.
        parts: the names of the parts to read; the files of others are not read. Default: all.
        without: the names of parts that are not read.
        make_target: returns the tensor to fill for one that was saved sharded, from its part and name
            (``model/0.weight``), shape and dtype; a sharded target gets this rank's part. Default: whole tensors.

    Returns:
        The facts, and the parts by name, with tensors on the CPU, or where `make_target` has put them.

    Raises:
        InvalidCheckpointError: names a file that is missing or was changed, or a part that the state does not have.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    names = part_names(manifest)
    entries = {entry.name: entry for entry in manifest.files}
    chosen = [name for name in (names if parts is None else parts) if name not in without]
    # Each file is hashed while it is read, so what was checked is what is used, even if somebody changes the file.
    structures = {name: _read_structure(folder, entries[f"{name}.json"]) for name in chosen}
    tensors = {name: read_file_of_tensors(folder, entries[f"{name}.safetensors"]) for name in chosen}
    if SHARDS_NAME in entries:
        layout = _read_structure(folder, entries[SHARDS_NAME])
        layout = {name: facts for name, facts in layout.items() if name.partition("/")[0] in chosen}
        for name, tensor in _read_shards(folder, entries, layout, make_target).items():
            part, _, path = name.partition("/")
            tensors[part][path] = tensor
    return manifest.facts, {name: decode(structures[name], tensors[name], path=name) for name in chosen}


def part_names(manifest: Manifest) -> list[str]:
    """The names of the parts of a state."""
    if PARTS in manifest.facts:  # others may have written files of the same kind
        return list(manifest.facts[PARTS])
    files = {entry.name for entry in manifest.files}
    stems = [name.removesuffix(".json") for name in sorted(files) if name.endswith(".json")]
    return [stem for stem in stems if f"{stem}.safetensors" in files]


def _read_structure(folder: Path, entry: FileEntry) -> Any:
    data = bytearray(entry.size_bytes)
    with open_verified(folder, entry) as read_into:
        read_into(memoryview(data))
    return load_json(bytes(data), what=str(folder / entry.name))


def read_file_of_tensors(folder: Path, entry: FileEntry) -> dict[str, Any]:
    """The tensors in a safetensors file of a folder, by name, after comparing them with its manifest."""
    with open_verified(folder, entry) as read_into:
        return dict(read_tensors(read_into, entry.size_bytes, what=str(folder / entry.name)))


def _write_shards(ranks: Ranks, staged: StagedFolder, encoded: Mapping[str, Encoded]) -> list[FileEntry]:
    """Write each rank's parts of sharded tensors to a folder that all ranks can reach. Must be called by all ranks.

    Returns:
        The files of all ranks, for `StagedFolder.commit`.

    Raises:
        CheckpointError: on every rank, if any rank could not write its file.
    """
    shards = {f"{name}/{key}": shard for name, part in encoded.items() for key, shard in part.sharded.items()}

    def write() -> list[FileEntry]:
        own = {
            f"{name}[{','.join(f'{start}:{end}' for start, end in shard.place)}]": shard.part
            for name, shard in shards.items()
            if shard.part.numel() and not shard.is_replica
        }
        files: dict[str, Iterable[bytes | memoryview]] = {}
        if own:
            files[f"shards_{ranks.index}.safetensors"] = chunks(own)
        if ranks.is_first:
            layout = {
                name: {"dtype": DTYPE_NAMES[shard.part.dtype], "shape": list(shard.shape)}
                for name, shard in shards.items()
            }
            files[SHARDS_NAME] = [dump_json(layout)]
        return staged.write_files(files.items())

    return [entry for files in ranks.exchange(ranks.do_on_all(write)) for entry in files]


def _read_shards(
    folder: Path, entries: Mapping[str, FileEntry], layout: Any, make_target: MakeTarget | None
) -> dict[str, torch.Tensor]:
    """The sharded tensors of a state folder. Reads and checks only the files that this rank needs.

    Args:
        folder, entries: the state, and its files by name.
        layout: the content of ``shards.json``.
        make_target: returns the tensor to fill for a name, shape and dtype; a sharded one gets this rank's part.

    Raises:
        InvalidCheckpointError: if `layout` is invalid, or a file is damaged.
    """
    files = filter(SHARDS_FILE.fullmatch, entries if layout else ())
    try:
        tensors = {name: (torch.Size(facts["shape"]), DTYPES[facts["dtype"]]) for name, facts in layout.items()}
        pieces = {file: dict(_pieces_of(folder / file)) for file in files}
        missing = {name: math.prod(shape) for name, (shape, _) in tensors.items()}
        for name, place in (piece for of_file in pieces.values() for piece in of_file.values()):
            if name in missing:
                missing[name] -= math.prod(end - start for start, end in place)
        if any(missing.values()):
            raise ValueError(f"the pieces of {[name for name, count in missing.items() if count]} do not cover them")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{folder / SHARDS_NAME} and the files of its pieces are inconsistent ({type(error).__name__}: {error})."
        ) from error
    targets: dict[str, Any] = {
        name: torch.empty(shape, dtype=dtype) if make_target is None else make_target(name, shape, dtype)
        for name, (shape, dtype) in tensors.items()
    }
    places = {
        name: shard_of(target).place if is_sharded(target) else [(0, size) for size in target.shape]
        for name, target in targets.items()
    }
    for name, place in (piece for of_file in pieces.values() for piece in of_file.values() if piece[0] in targets):
        # A rank whose part is cut in another way, along dimensions or as a row of numbers, reads the whole tensor.
        if len(place) != len(places[name]):
            shape, dtype = tensors[name]
            targets[name] = torch.empty(shape, dtype=dtype)
            places[name] = [(0, shape.numel())] if len(place) != len(shape) else [(0, size) for size in shape]
    # A run may resume on another number of ranks, so a saved piece and a rank's part overlap in any way.
    for file, of_file in pieces.items():
        common = {
            piece: [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(place, places[name], strict=True)]
            for piece, (name, place) in of_file.items()
            if name in targets
        }
        wanted = {piece for piece, spans in common.items() if all(start < end for start, end in spans)}
        if not wanted:
            continue
        with open_verified(folder, entries[file]) as read_into, torch.no_grad():
            for piece, values in read_tensors(read_into, entries[file].size_bytes, what=str(folder / file)):
                if piece in wanted:
                    name, place = of_file[piece]
                    part = values[_within(common[piece], place)]
                    own = own_part(targets[name])
                    own = own if own.ndim == len(places[name]) else own.view(-1)
                    own[_within(common[piece], places[name])].copy_(part)
    return targets


def _pieces_of(file: Path) -> Iterator[tuple[str, tuple[str, Place]]]:
    """The names of the pieces in a file, with their tensors and places. The ranks that read them verify the file."""
    for piece, _, _ in tensors_of_file(file):
        name, _, spans = piece.removesuffix("]").rpartition("[")
        start_and_end = [span.split(":") for span in spans.split(",") if span]
        yield piece, (name, [(int(start), int(end)) for start, end in start_and_end])


def _within(spans: Place, place: Place) -> tuple[slice, ...]:
    """The indices of `spans` in a piece that lies at `place`."""
    return tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(spans, place, strict=True))


class BackgroundWriter:
    """Writes state folders, one at a time, in its own thread; the run waits only while the tensors are copied.

    All tensors are copied before the run continues: one by one as they are written, they would come from different
    updates. The copies are as large as the state, so this is off by default. They are in host memory (pinned for
    tensors of a CUDA device), and are reused for the next state, until `close`, because allocating so much memory costs
    several times as much as the copy itself. Only the thread of the run may call the methods.

    A thread is enough, because hashing and writing release the interpreter's lock; another process would need the
    copies in shared memory.

    Attributes:
        failure: why a state could not be written; `wait` raises it.
        after_each: functions that the thread calls when a state is complete, before the next one starts.
    """

    def __init__(self) -> None:
        self.after_each: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self._copies: dict[tuple[str, ...], torch.Tensor] = {}
        self._devices: set[torch.device] = set()

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
        """Start `write_encoded` with a copy of the tensors as they are now.

        First waits until the previous folder is complete. `ranks` need a process group that nothing else uses.

        Raises:
            CheckpointError: if the previous folder could not be written.
        """
        self.wait()
        parts = {
            name: Encoded(
                part.structure,
                {key: self._copy((name, key), tensor) for key, tensor in part.tensors.items()},
                {
                    key: replace(one, part=self._copy((name, key, "shard"), one.part))
                    for key, one in part.sharded.items()
                },
            )
            for name, part in encoded.items()
        }
        for device in self._devices:  # the next update would change tensors that are still being copied
            torch.cuda.current_stream(device).synchronize()
        self._start(lambda: write_encoded(final, facts, parts, ranks))

    def follow_up(self) -> None:
        """Start to call `after_each`, for a state that something else has written: deleting old ones takes long."""
        self.wait()
        if self.after_each:
            self._start(lambda: None)

    def _start(self, write: Callable[[], None]) -> None:
        # Not a daemon thread, because the program must not exit before the state is complete.
        self._thread = threading.Thread(target=self._write, args=(write,), name="state writer")
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
            raise CheckpointError(f"The background work on a training state failed: {failure!r}.") from failure

    def close(self) -> None:
        """`wait`, then free the copies."""
        try:
            self.wait()
        finally:
            self._copies.clear()

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
            for call in self.after_each:
                call()
        except BaseException as error:
            self.failure = error

    def _copy(self, key: tuple[str, ...], tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        copy = self._copies.get(key)
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        if copy is None or (copy.shape, copy.stride(), copy.dtype) != (shape, stride, dtype):
            # With the strides of the tensor: another order of dimensions would make the copy two to four times slower.
            copy = torch.empty_strided(shape, stride, dtype=dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = copy
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)
