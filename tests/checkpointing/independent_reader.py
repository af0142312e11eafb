"""A reader of training states made from `docs/checkpoint_format.md` alone, as somebody would for another language.

It uses nothing of the package, nor torch: tensors come as nested lists.
"""

import hashlib
import json
import math
import re
import struct
from base64 import b64decode
from pathlib import Path
from typing import Any

FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "?"}
VIEW_FORMATS = {"float64": ("d", 8), "float32": ("f", 4), "int64": ("q", 8), "uint8": ("B", 1)}


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts and parts of a state."""
    manifest = check_manifest((folder / "manifest.json").read_bytes())
    assert manifest["format"] == 1
    files = {}
    for entry in manifest["files"]:
        files[entry["name"]] = content = (folder / entry["name"]).read_bytes()
        assert len(content) == entry["size_bytes"]
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    parts = {}
    for name in files:
        if name.endswith(".json") and name != "shards.json":
            part = name.removesuffix(".json")
            tensors = {**read_tensors(files[f"{part}.safetensors"]), **read_sharded(files, part)}
            parts[part] = decode(json.loads(files[name]), tensors)
    return decode(manifest["facts"], {}), parts


def check_manifest(data: bytes) -> dict[str, Any]:
    """The manifest, if the checksum in it is right."""
    strings = r'("(?:[^"\\]|\\.)*")'
    compact = re.sub(strings + r"|\s+", lambda match: match[1] or "", data.decode("ascii"))
    match = re.fullmatch(r'(.*),"sha256":"([0-9a-f]{64})"\}', compact)
    assert match is not None
    assert hashlib.sha256(f"{match[1]}}}".encode()).hexdigest() == match[2]
    manifest: dict[str, Any] = json.loads(data)
    return manifest


def read_tensors(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor."""
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    rest = data[8 + header_bytes :]
    return {name: (one["dtype"], one["shape"], rest[slice(*one["data_offsets"])]) for name, one in header.items()}


def read_sharded(files: dict[str, bytes], part: str) -> dict[str, tuple[str, list[int], bytes]]:
    """The same of the sharded tensors of a part, put together from their pieces."""
    whole = {}
    for name, facts in json.loads(files.get("shards.json", b"{}")).items():
        if name.startswith(f"{part}/"):
            shape = facts["shape"]
            size = {"F64": 8, "F32": 4}[facts["dtype"]]
            content = bytearray(math.prod(shape) * size)
            for file in files:
                pieces = read_tensors(files[file]) if re.fullmatch(r"shards_\d+\.safetensors", file) else {}
                for piece, (_, sizes, data) in pieces.items():
                    if piece.startswith(f"{name}["):
                        spans = [span.split(":") for span in piece[len(name) + 1 : -1].split(",") if span]
                        starts = [int(start) for start, _ in spans]
                        for number in range(math.prod(sizes)):
                            place, rest = 0, number
                            for dimension in reversed(range(len(shape))):
                                rest, index = divmod(rest, sizes[dimension])
                                place += (starts[dimension] + index) * math.prod(shape[dimension + 1 :])
                            content[place * size : (place + 1) * size] = data[number * size : (number + 1) * size]
            whole[name.removeprefix(f"{part}/")] = (facts["dtype"], shape, bytes(content))
    return whole


def decode(node: Any, tensors: dict[str, tuple[str, list[int], bytes]]) -> Any:
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: decode(item, tensors) for key, item in node.items()}
    kind = node["$"]
    if kind == "int":
        return int(node["hex"], 16)
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[node["text"]]
    if kind == "complex":
        return complex(decode(node["real"], tensors), decode(node["imag"], tensors))
    if kind == "bytes":
        return b64decode(node["base64"])
    if kind in ("tuple", "size"):
        return tuple(decode(item, tensors) for item in node["items"])
    if kind in ("dict", "ordered dict", "counter"):
        return {decode(key, tensors): decode(item, tensors) for key, item in node["items"]}
    if kind in ("tensor", "sharded"):
        dtype, shape, data = tensors[node["name"]]
        if dtype == "BF16":  # the upper half of a float32
            numbers = [struct.unpack("<f", b"\0\0" + data[place : place + 2])[0] for place in range(0, len(data), 2)]
        else:
            numbers = [number for (number,) in struct.iter_unpack("<" + FORMATS[dtype], data)]
        return nested(numbers, shape)
    if kind == "view":
        _, _, data = tensors[node["name"]]
        number, size = VIEW_FORMATS[node["dtype"]]
        elements = [one for (one,) in struct.iter_unpack("<" + number, data[: len(data) // size * size])]
        return picked(elements, node["offset"], node["shape"], node["stride"])
    raise NotImplementedError(kind)


def nested(numbers: list[Any], shape: list[int]) -> Any:
    if not shape:
        return numbers[0]
    step = len(numbers) // shape[0] if shape[0] else 0
    return [nested(numbers[index * step : (index + 1) * step], shape[1:]) for index in range(shape[0])]


def picked(elements: list[Any], offset: int, shape: list[int], stride: list[int]) -> Any:
    if not shape:
        return elements[offset]
    return [picked(elements, offset + index * stride[0], shape[1:], stride[1:]) for index in range(shape[0])]
