"""Files under the names of checkpoints that somebody made to do harm. A script reads them, in memory that is limited.

Its argument is the folder with the files.
"""

import io
import os
import pickle
import resource
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.huggingface.checkpoints.generators import read_generator_states
from tests.chaos.hostile import Gadget

ROOM_BYTES = 200 * 10**6
HUGE = 2**28


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def repacked(data: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with other contents; a record for which there is None is left out."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w", method) as new:
        for name in old.namelist():
            content = change(name.partition("/")[2], old.read(name))
            if content is not None:
                new.writestr(name, content)
    return result.getvalue()


def with_program(program: bytes) -> bytes:
    """An archive in the place of whose pickle there is another one."""
    return repacked(saved({"a": torch.ones(2)}), lambda name, content: program if name == "data.pkl" else content)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def call(name: str, *arguments: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + function.encode() + b"\n(" + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    data = value.to_bytes(12, "little")
    return b"\x8a" + bytes([len(data)]) + data


def data_of(count: int, key: str = "0", kind: str = "FloatStorage", old: bool = False) -> bytes:
    last = b"N" if old else b""
    return (
        b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + last + b"tQ"
    )


def tensor(data: bytes, offset: int, shape: bytes, strides: bytes) -> bytes:
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", data, number(offset), shape, strides, b"\x89", hooks)


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def entry(value: bytes) -> bytes:
    """A program that makes a dict with one value."""
    return b"\x80\x02}" + text("a") + value + b"s."


def in_a_row(program: bytes) -> bytes:
    """A file as torch wrote them long ago."""
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    head = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, facts)]
    return b"".join([*head, program, pickle.dumps(["0"], 2), struct.pack("<Q", HUGE)])


def nested(begin: bytes, end: bytes, times: int) -> bytes:
    return begin * times + end * times


def laughing(levels: int) -> bytes:
    """A list of ten references to a list of ten references, and so on."""
    program = b"]q\x00"
    for _ in range(levels):
        program += b"](" + b"h\x00" * 10 + b"eq\x00"
    return program


def as_folder(data: bytes) -> bytes:
    """With the bit that marks the data of a tensor as a folder; its checksum still fits."""
    changed = bytearray(data)
    start = data.index(b"PK\x01\x02", data.rindex(b"PK\x01\x02") - 1000)
    while data[start + 46 : start + 46 + 14].find(b"/data/0") < 0:
        start = data.index(b"PK\x01\x02", start + 1)
    changed[start + 38] |= 0x10
    return bytes(changed)


def overlapping(data: bytes) -> bytes:
    """An archive in which a hundred records are one and the same."""
    end = struct.unpack("<4s4HIIH", data[-22:])
    directory = data[end[6] : end[6] + end[5]]
    first = directory[: directory.index(b"PK\x01\x02", 4)]
    return (
        data[: end[6]]
        + directory
        + first * 100
        + struct.pack("<4s4HIIH", b"PK\x05\x06", 0, 0, end[3] + 100, end[4] + 100, end[5] + 100 * len(first), end[6], 0)
    )


WEIGHTS = saved({"a": torch.arange(4.0)})
ONE = data_of(2)
FILES: dict[str, Callable[[], bytes]] = {
    "the bit of a folder": lambda: as_folder(WEIGHTS),
    "a compressed gigabyte": lambda: repacked(
        saved({"a": torch.zeros(2)}),
        lambda name, content: bytes(HUGE) if name == "data/0" else content,
        zipfile.ZIP_DEFLATED,
    ),
    "records that overlap": lambda: overlapping(repacked(WEIGHTS, lambda name, content: content)),
    "something before the records": lambda: b"#!/bin/sh\n" + WEIGHTS,
    "something behind the records": lambda: WEIGHTS + b"rest",
    "no data": lambda: repacked(WEIGHTS, lambda name, content: None if name == "data/0" else content),
    "half of the data": lambda: repacked(WEIGHTS, lambda name, content: content[:8] if name == "data/0" else content),
    "too much data": lambda: repacked(WEIGHTS, lambda name, content: content * 2 if name == "data/0" else content),
    "another order of bytes": lambda: repacked(
        WEIGHTS, lambda name, content: b"big" if name == "byteorder" else content
    ),
    "data of a gigabyte": lambda: with_program(entry(tensor(data_of(HUGE), 0, tuple_of(number(2)), b"(K\x01t"))),
    "data of a gigabyte, as of old": lambda: in_a_row(entry(data_of(HUGE, old=True))),
    "a tensor behind its data": lambda: with_program(entry(tensor(ONE, 2, tuple_of(number(1)), b"(K\x01t"))),
    "a tensor beyond its data": lambda: with_program(entry(tensor(ONE, 0, tuple_of(number(HUGE)), b"(K\x01t"))),
    "a tensor with long steps": lambda: with_program(entry(tensor(ONE, 0, b"(K\x02t", tuple_of(number(HUGE))))),
    "a tensor that repeats": lambda: with_program(entry(tensor(ONE, 0, tuple_of(number(2**40)), b"(K\x00t"))),
    "a tensor of 2^80": lambda: with_program(entry(tensor(ONE, 0, tuple_of(number(2**70)), b"(K\x00t"))),
    "a tensor before its data": lambda: with_program(entry(tensor(ONE, 0, b"(J\xff\xff\xff\xfft", b"(K\x01t"))),
    "a tensor without data": lambda: with_program(
        entry(call("torch._utils._rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\n", tuple_of(number(HUGE))))
    ),
    "an array of bytes": lambda: with_program(entry(call("__builtin__.bytearray", number(HUGE)))),
    "a tensor by its class": lambda: with_program(entry(call("torch.FloatTensor", number(HUGE)))),
    "a storage by its class": lambda: with_program(entry(call("torch.FloatStorage", number(HUGE)))),
    "a range": lambda: with_program(entry(call("__builtin__.set", call("__builtin__.range", number(HUGE))))),
    "one text a thousand times": lambda: with_program(
        entry(b"(" + text("x" * 10**6) + b"q\x01" + call("_codecs.encode", b"h\x01", text("latin1")) * 1000 + b"t")
    ),
    "one list a thousand times": lambda: with_program(
        b"\x80\x02](" + b"K\x01" * 10**5 + b"eq\x01" + entry(b"(" + call("torch.Size", b"h\x01") * 10**4 + b"t")[2:]
    ),
    "ten million lists": lambda: with_program(entry(b"(" + b"]" * 10**7 + b"t")),
    "lists in lists": lambda: with_program(entry(nested(b"]", b"a", 10**5)[:-1])),
    "marks in marks": lambda: with_program(entry(nested(b"(", b"t", 10**5))),
    "a list in itself": lambda: with_program(entry(b"]q\x00h\x00a")),
    "ten to the twentieth": lambda: with_program(entry(laughing(20))),
    "tuples in tuples as a key": lambda: with_program(b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 80 + b"K\x01s."),
    "keys with one hash": lambda: with_program(
        entry(b"}(" + b"".join(number((2**61 - 1) * (factor + 1)) + b"N" for factor in range(20_000)) + b"u")
    ),
    "an instruction that is none": lambda: with_program(b"\x80\x02}\xff."),
    "a call of a command": lambda: with_program(entry(call("os.system", text("true")))),
    "a command itself": lambda: with_program(entry(b"cos\nsystem\n")),
    "a class of torch": lambda: with_program(entry(b"ctorch\nTensor\n")),
    "an object of a class": lambda: saved({"a": Gadget(Path("trap"))}),
    "a plain pickle": lambda: pickle.dumps({"a": Gadget(Path("trap"))}),
    "an empty program": lambda: with_program(b""),
    "a program without an end": lambda: with_program(b"\x80\x02}"),
    "a stack that is empty": lambda: with_program(b"."),
    "text that is longer than the file": lambda: with_program(b"X\xff\xff\xff\xffabc."),
    "text that is no UTF-8": lambda: with_program(b"X\x01\x00\x00\x00\xff."),
    "data in place of a value": lambda: with_program(entry(ONE)),
    "an attribute that is a method": lambda: with_program(
        entry(call("collections.OrderedDict") + b"}" + text("items") + b"Nsb")
    ),
}


def forged_array(code: str, octets: bytes = bytes(2496), shape: bytes = b"(M\x70\x02t") -> bytes:
    """A state of numpy's generator whose array is forged."""
    kind = call("numpy.dtype", text(code), b"K\x00", b"K\x01")
    kind += b"(K\x03" + text("|" if code == "O8" else "<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb"
    data = call("_codecs.encode", text(octets.decode("latin-1")), text("latin1"))
    empty = call("_codecs.encode", text("b"), text("latin1"))
    array = call("numpy.core.multiarray._reconstruct", b"cnumpy\nndarray\n", b"(K\x00t", empty)
    array += b"(K\x01" + shape + kind + b"\x89" + data + b"tb"
    keys = b"(" + text("MT19937") + array + b"M\x70\x02K\x00G" + bytes(8) + b"t"
    return with_program(b"\x80\x02}" + text("numpy") + keys + b"s.")


GENERATORS: dict[str, Callable[[], bytes]] = {
    "an array of objects at an address of the file": lambda: forged_array("O8", b"A" * 8, b"(K\x01t"),
    "an array of many objects": lambda: forged_array("O8", b"A" * 2496, b"(M\x38\x01t"),
    "an array of text": lambda: forged_array("U4"),
    "an array of other numbers": lambda: forged_array("f4"),
    "an array with too few bytes": lambda: forged_array("u4", bytes(8)),
    "an array of gigabytes": lambda: forged_array("u4", bytes(8), tuple_of(number(HUGE))),
    "a scalar of numpy": lambda: saved({"numpy": np.float64(1.0)}),
    "a kind that is built of text": lambda: with_program(
        entry(call("numpy.dtype", text("u4"), b"K\x00", b"K\x01") + text("<") + b"b")
    ),
}


def write_all(folder: Path) -> int:
    """Put the files into a folder; returns how many there are."""
    for kind, files in (("pt", FILES), ("pth", GENERATORS)):
        for name, make in files.items():
            (folder / f"{name}.{kind}").write_bytes(make())
    return len(FILES) + len(GENERATORS)


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    torch.save({"a": torch.ones(2)}, folder / "usual")
    assert load_portable(folder / "usual")["a"].sum() == 2  # what is imported at first use is there now
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for path in sorted(folder.glob("*.pt*")):
        print(path.name, flush=True)  # the last one is what a crash was at
        try:
            (load_portable if path.suffix == ".pt" else read_generator_states)(path)
        except CheckpointError as error:
            message = str(error)
            assert len(message) < 2000, "a message that nobody can read"
            continue
        raise AssertionError(f"{path.name} was accepted")
    assert not Path("trap").exists()
    print("all refused")


if __name__ == "__main__":
    main()
