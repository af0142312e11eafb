"""Folders that somebody made to do harm: each fits its manifest, so that what stands in it is judged."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.saved_runs import sign

PARTS = ("model", "optimizer", "scheduler", "scaler", "run", "callbacks", "extra", "rank_0")
FILES = ["manifest.json", *(f"{part}.{suffix}" for part in PARTS for suffix in ("json", "safetensors"))]
HUGE = 10**9


class Gadget:
    """Runs a command when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.trap}'",)


def put(folder: Path, file: str, content: bytes | str) -> None:
    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def change(folder: Path, part: str, path: str, value: Any) -> None:
    """Put `value` at a place of a part's structure, which is given as keys and indices with slashes between."""
    file = folder / f"{part}.json"
    structure = json.loads(file.read_bytes())
    *parents, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    node = structure
    for step in parents:
        node = node[step]
    node[last] = value
    file.write_text(json.dumps(structure))


def remove(folder: Path, part: str, key: str) -> None:
    file = folder / f"{part}.json"
    structure = json.loads(file.read_bytes())
    del structure[key]
    file.write_text(json.dumps(structure))


def tensor_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def rewrite_header(folder: Path, part: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a part's tensor file, with the data as it was."""
    data = (folder / f"{part}.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    put(folder, f"{part}.safetensors", tensor_file(header, data[end:]))


def first_tensor(folder: Path, part: str, **changes: Any) -> None:
    rewrite_header(folder, part, lambda header: next(iter(header.values())).update(changes))


def change_facts(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    sign(folder, facts={**manifest["facts"], **changes})


def rename_entry(folder: Path, name: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"][0]["name"] = name
    sign(folder, files=manifest["files"])


def edit_entry(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    sign(folder, files=[{**manifest["files"][0], **changes}, *manifest["files"][1:]])


def link(folder: Path, file: str, target: Path) -> None:
    (folder / file).unlink()
    (folder / file).symlink_to(target)


def pipe(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)


def drop_part(folder: Path, part: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    sign(folder, files=[entry for entry in manifest["files"] if entry["name"].rpartition(".")[0] != part])


RNG = "generators/numpy"
NAN = {"$": "float", "text": "nan"}
FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
VIEW = {"$": "view", "name": "0.weight", "dtype": "float64", "offset": 0, "shape": [1], "stride": [1]}

# What is done to a folder. Those in CONTENT are signed again afterwards.
CONTENT: dict[str, Callable[[Path], Any]] = {
    # JSON
    "a structure that is not JSON": lambda folder: put(folder, "run.json", b"\x80\x04K\x01."),
    "an empty structure": lambda folder: put(folder, "run.json", b""),
    "a structure nested a million times": lambda folder: put(folder, "run.json", b"[" * 10**6),
    "a structure nested 33 times": lambda folder: put(folder, "run.json", b"[" * 33 + b"]" * 33),
    "a structure of 17 MB": lambda folder: put(folder, "run.json", b" " * (17 * 2**20)),
    "a key twice": lambda folder: put(folder, "run.json", '{"run_state": {}, "run_state": {}}'),
    "a bare NaN": lambda folder: put(folder, "run.json", '{"run_state": NaN}'),
    "a number beyond all floats": lambda folder: put(folder, "run.json", '{"run_state": 1e999}'),
    "a number of a million digits": lambda folder: put(folder, "run.json", "1" * 10**6),
    "text that is no UTF-8": lambda folder: put(folder, "run.json", b'"\xff"'),
    # codec
    "an unknown kind": lambda folder: change(folder, "extra", "note", {"$": "pickle", "value": "gASVAAAA"}),
    "a kind that names code": lambda folder: change(folder, "extra", "note", {"$": "os.system", "items": ["id"]}),
    "a call": lambda folder: change(folder, "extra", "note", {"$": "call", "function": "os.system", "args": ["id"]}),
    "a kind that is a method of the reader": lambda folder: change(folder, "extra", "note", {"$": "decode", "node": 1}),
    "a dtype that names a function": lambda folder: change(folder, "extra", "note", {"$": "dtype", "name": "load"}),
    "a device that names a path": lambda folder: change(folder, "extra", "note", {"$": "device", "name": "../../etc"}),
    "a tensor that is not there": lambda folder: change(folder, "extra", "note", {"$": "tensor", "name": "none"}),
    "a tensor of another part": lambda folder: change(folder, "run", "config", {"$": "tensor", "name": "0.weight"}),
    "base64 with rubbish": lambda folder: change(folder, "extra", "note", {"$": "bytes", "base64": "a b!"}),
    "a key that cannot be one": lambda folder: change(folder, "extra", "note", {"$": "dict", "items": [[[], 1]]}),
    "100,000 keys with one hash": lambda folder: change(
        folder, "extra", "note", {"$": "dict", "items": [[(2**61 - 1) * number, 0] for number in range(100_000)]}
    ),
    "a view behind the end": lambda folder: change(
        folder, "model", "items/0/1", {**VIEW, "offset": 2**40, "dtype": "uint8"}
    ),
    "a view before the start": lambda folder: change(folder, "model", "items/0/1", {**VIEW, "offset": -1}),
    "a view of terabytes": lambda folder: change(
        folder, "model", "items/0/1", {**VIEW, "shape": [2**40], "stride": [0]}
    ),
    "one tensor in two layouts": lambda folder: change(
        folder,
        "extra",
        "note",
        [
            {"$": "tensor", "name": "matrix", "stride": [1, 1000]},
            {"$": "tensor", "name": "matrix", "stride": [1000, 1]},
        ],
    ),
    # tensor files
    "a tensor file that is empty": lambda folder: put(folder, "model.safetensors", b""),
    "a header that claims a gigabyte": lambda folder: put(
        folder, "model.safetensors", struct.pack("<Q", 2**30) + b"{}"
    ),
    "a header that claims everything": lambda folder: put(
        folder, "model.safetensors", struct.pack("<Q", 2**64 - 1) + b"{}"
    ),
    "a header that is a list": lambda folder: put(folder, "model.safetensors", tensor_file([])),
    "a header with a tensor twice": lambda folder: put(folder, "model.safetensors", tensor_file(b'{"a": 1, "a": 1}')),
    "a tensor that claims a petabyte": lambda folder: first_tensor(
        folder, "model", shape=[2**47], data_offsets=[0, 2**50]
    ),
    "a tensor of negative size": lambda folder: first_tensor(folder, "model", shape=[-1, -4]),
    "a tensor of a million dimensions": lambda folder: first_tensor(folder, "model", shape=[2**62] * 10**6),
    "a tensor of an unknown dtype": lambda folder: first_tensor(folder, "model", dtype="F33"),
    "a tensor with half the bytes": lambda folder: first_tensor(folder, "model", dtype="F32"),
    "tensors that overlap": lambda folder: put(
        folder, "model.safetensors", tensor_file({"a": FLOATS, "b": FLOATS}, bytes(8))
    ),
    "tensors with a gap": lambda folder: put(
        folder, "model.safetensors", tensor_file({"a": {**FLOATS, "data_offsets": [4, 12]}}, bytes(12))
    ),
    "bytes that belong to no tensor": lambda folder: put(
        folder, "model.safetensors", tensor_file({"a": FLOATS}, bytes(9))
    ),
    # parts that make no sense
    "a model that is a list": lambda folder: put(folder, "model.json", "[]"),
    "a model that is a number": lambda folder: put(folder, "model.json", "3"),
    "a model with a number for a tensor": lambda folder: change(folder, "model", "items/0/1", 3),
    "weights that are whole numbers": lambda folder: first_tensor(folder, "model", dtype="I64"),
    "weights of another shape": lambda folder: first_tensor(folder, "model", shape=[3, 4]),
    "a model whose versions are a number": lambda folder: change(folder, "model", "metadata", 3),
    "a model whose versions are text": lambda folder: change(folder, "model", "metadata", {"0": {"version": "x"}}),
    "a model too many": lambda folder: change(folder, "model", "items/0/0", "../../weight"),
    "an optimizer that is text": lambda folder: put(folder, "optimizer.json", '"adam"'),
    "an optimizer without groups": lambda folder: remove(folder, "optimizer", "param_groups"),
    "groups that are a number": lambda folder: change(folder, "optimizer", "param_groups", 3),
    "a group that is a list": lambda folder: change(folder, "optimizer", "param_groups/0", []),
    "a group with parameters that are lists": lambda folder: change(
        folder, "optimizer", "param_groups/0/params", [[0]]
    ),
    "a group with too many parameters": lambda folder: change(
        folder, "optimizer", "param_groups/0/params", list(range(9))
    ),
    "a function that nobody has": lambda folder: change(folder, "optimizer", "param_groups/0/lr", {"$": "live"}),
    "NaN steps": lambda folder: change(folder, "optimizer", "state/items/0/1/step", NAN),
    "steps below zero": lambda folder: change(folder, "optimizer", "state/items/0/1/step", -1),
    "no run": lambda folder: put(folder, "run.json", "null"),
    "NaN updates": lambda folder: change(folder, "run", "run_state/updates", NAN),
    "updates below zero": lambda folder: change(folder, "run", "run_state/updates", -3),
    "updates that are true": lambda folder: change(folder, "run", "run_state/updates", True),
    "other updates than the facts": lambda folder: change(folder, "run", "run_state/updates", 3),
    "an unknown phase": lambda folder: change(folder, "run", "run_state/phase", "__class__"),
    "an unknown count": lambda folder: change(folder, "run", "run_state/__class__", 3),
    "a history that is text": lambda folder: change(folder, "run", "history", "x"),
    "a record that is a number": lambda folder: change(folder, "run", "history/records", [3]),
    "a record without a name": lambda folder: change(folder, "run", "history/records", [[None, 0.5, 1, 1]]),
    "a metric without a name": lambda folder: change(folder, "run", "history/records/0/0", 0.5),
    "an epoch below zero": lambda folder: change(folder, "run", "history/current_epoch", -1),
    "callbacks that are a list": lambda folder: put(folder, "callbacks.json", "[]"),
    "losses that are text": lambda folder: change(folder, "rank_0", "losses/pending_losses", "12"),
    "losses without weights": lambda folder: change(folder, "rank_0", "losses/pending_losses", [1.0] * 7),
    "a generator of text": lambda folder: change(folder, "rank_0", "generators/torch", "x"),
    "numpy at a position far outside": lambda folder: change(folder, "rank_0", f"{RNG}/2", 10**6),
    "numpy at a position below zero": lambda folder: change(folder, "rank_0", f"{RNG}/2", -1),
    "numpy with another algorithm": lambda folder: change(folder, "rank_0", f"{RNG}/0", "PCG64"),
    "a generator with one number": lambda folder: change(folder, "rank_0", "generators/random/1", [1]),
    "a generator at a position far outside": lambda folder: change(folder, "rank_0", "generators/random/1/624", 9999),
}
MANIFEST: dict[str, Callable[[Path], Any]] = {
    "no checksum": lambda folder: put(folder, "manifest.json", '{"format": 1, "serial": 1, "facts": {}, "files": []}'),
    "a name with a parent": lambda folder: rename_entry(folder, "../callbacks.json"),
    "a name with a folder": lambda folder: rename_entry(folder, "a/callbacks.json"),
    "an absolute name": lambda folder: rename_entry(folder, str(folder / "callbacks.json")),
    "a name that is the parent": lambda folder: rename_entry(folder, ".."),
    "a name that is the manifest": lambda folder: rename_entry(folder, "manifest.json"),
    "a name with a zero byte": lambda folder: rename_entry(folder, "a\0.json"),
    "a name that is a number": lambda folder: rename_entry(folder, 3),
    "a name that is nothing": lambda folder: rename_entry(folder, None),
    "a name that is empty": lambda folder: rename_entry(folder, ""),
    "a name of a drive": lambda folder: rename_entry(folder, "C:\\x"),
    "a name that is the home": lambda folder: rename_entry(folder, "~"),
    "a file twice": lambda folder: rename_entry(folder, "extra.json"),
    "a size below zero": lambda folder: edit_entry(folder, size_bytes=-2),
    "a size of exabytes": lambda folder: edit_entry(folder, size_bytes=2**62),
    "a size that is true": lambda folder: edit_entry(folder, size_bytes=True),
    "a size that is text": lambda folder: edit_entry(folder, size_bytes="2"),
    "a field too many": lambda folder: edit_entry(folder, mode=0o777),
    "a checksum that is none": lambda folder: edit_entry(folder, sha256="0" * 63),
    "a checksum that is a number": lambda folder: edit_entry(folder, sha256=0),
    "a past format": lambda folder: sign(folder, format=0),
    "a format that is text": lambda folder: sign(folder, format="1"),
    "a future format": lambda folder: sign(folder, format=2),
    "a format that is true": lambda folder: sign(folder, format=True),
    "a serial below zero": lambda folder: sign(folder, serial=-1),
    "a serial that is a fraction": lambda folder: sign(folder, serial=1.5),
    "files that are names": lambda folder: sign(folder, files=["model.json"]),
    "files that are a dict": lambda folder: sign(folder, facts={}, files={}),
    "facts that are a list": lambda folder: sign(folder, facts=[]),
    "facts with a tensor": lambda folder: change_facts(folder, updates={"$": "tensor", "name": "0.weight"}),
    "facts of a kind that is code": lambda folder: change_facts(folder, updates={"$": "eval", "text": "1"}),
    "ranks below zero": lambda folder: change_facts(folder, ranks=-1),
    "a billion ranks": lambda folder: change_facts(folder, ranks=HUGE),
    "ranks that are NaN": lambda folder: change_facts(folder, ranks=NAN),
    "a seed that is text": lambda folder: change_facts(folder, seed="x"),
    "a seed of a million digits": lambda folder: change_facts(folder, seed={"$": "int", "hex": "0x" + "f" * 10**6}),
    "more updates than its parts": lambda folder: change_facts(folder, updates=HUGE),
    "a part that is not listed": lambda folder: drop_part(folder, "run"),
    "nothing listed": lambda folder: sign(folder, files=[]),
    "a file that is a link": lambda folder: link(folder, "model.safetensors", folder.parent / "model.safetensors"),
    "a file that is a link to a device": lambda folder: link(folder, "model.safetensors", Path("/dev/zero")),
    "a file that is a link to itself": lambda folder: link(folder, "model.json", folder / "model.json"),
    "a file that is a pipe": lambda folder: pipe(folder, "run.json"),
    "a manifest that is a link to a device": lambda folder: link(folder, "manifest.json", Path("/dev/zero")),
    "a manifest that is a pipe": lambda folder: pipe(folder, "manifest.json"),
}


def make_pickle(folder: Path, file: str, trap: Path) -> None:
    """A pickle that runs a command, under the name of one of our files."""
    put(folder, file, pickle.dumps(Gadget(trap)))
    if file != "manifest.json":
        sign(folder)


def make_hostile(folder: Path, name: str, trap: Path) -> None:
    """Turn the state in `folder` into the hostile one of that name."""
    if name.startswith("a pickle as "):
        make_pickle(folder, name.removeprefix("a pickle as "), trap)
    elif name in CONTENT:
        CONTENT[name](folder)
        sign(folder)
    else:
        MANIFEST[name](folder)


NAMES = [*CONTENT, *MANIFEST, *(f"a pickle as {file}" for file in FILES)]
