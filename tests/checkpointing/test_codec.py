import enum
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.states.codec import decode, dump_json, encode, load_json
from pytorch_accelerated.states.optimizers import with_callables, without_callables
from tests.checkpointing.same_state import assert_same_state
from tests.checkpointing.test_formats import read, written


def through_files(value: Any) -> Any:
    """`value` as it comes back after both files were written and read."""
    encoded = encode(value, path="part")
    structure = load_json(dump_json(encoded.structure), what="it")
    return decode(structure, read(written(encoded.tensors)), path="part")


class Colour(enum.Enum):
    RED = (1, "red")


class Level(str, enum.Enum):
    LOW = "low"


class Bits(enum.Flag):
    A = 1
    B = 2


PLAIN = {
    "none, bools and small numbers": [None, True, False, 0, 1, -1, 0.0, -0.0, 1.5, 5e-324, 1.7976931348623157e308],
    "ints of any size": [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000, -(10**5000)],
    "numbers that are not finite": [math.nan, math.inf, -math.inf],
    "complex numbers": [1 + 2j, complex(math.nan, -math.inf), -0.0j],
    "text": ["", "é", "\n\0", "\ud800", "$"],
    "bytes": [b"", bytes(range(256))],
    "nested sequences": [[], (), [()], ([1], (2, [3]))],
    "empty dict": {},
    "keys of any kind": {1: "int", "1": "text", (1, ("a", None)): "tuple", None: 0, 2.5: 0, b"x": 0, math.inf: 0},
    "bool keys": {True: 1, False: 0},
    "keys that look like our marks": {"$": "tensor", "name": "x"},
    "our marks inside": [{"$": {"$": {"$": 1}}}],
    "ordered dict": OrderedDict(b=1, a=[OrderedDict()]),
    "counter": Counter({30: 1, 80: 2}),
    "size, dtype and device": [torch.Size([2, 3]), torch.bfloat16, torch.complex128, torch.device("cuda", 1)],
    "python's generator": random.Random(0).getstate(),
    "numpy's generators": [np.random.RandomState(0).get_state(), np.random.PCG64(3).state, np.random.MT19937(3).state],
    "torch's generator": torch.Generator().manual_seed(3).get_state(),
    "numpy arrays": [np.arange(3.0), np.zeros((0, 2)), np.array(5), np.asfortranarray(np.ones((2, 3), np.uint16))],
    "read-only numpy array": np.broadcast_to(np.arange(3), (2, 3)),
    "numpy scalars": [np.float64(0.1), np.float32("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)],
    "numpy scalar as key": {np.int64(3): 1},
    "tensor": torch.arange(3),
    "unusual dtypes": [torch.tensor([1 + 2j], dtype=torch.complex128), torch.ones(3).to(torch.float8_e8m0fnu)],
    "complex32": torch.arange(4, dtype=torch.float16).view(torch.complex32),
}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_values_come_back_as_they_were(value):
    assert_same_state(through_files(value), value)


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=9),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
leaves = keys | st.floats() | st.complex_numbers() | st.sampled_from([torch.float32, torch.ones(2, 3).t(), np.int8(1)])
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(nested)
def test_any_nesting_comes_back_as_it_was(value):
    assert_same_state(through_files(value), value)


@pytest.mark.parametrize(("member", "plain"), [(Colour.RED, (1, "red")), (Level.LOW, "low"), (Bits.A | Bits.B, 3)])
def test_of_an_enum_the_plain_value_comes_back(member, plain):
    assert_same_state(through_files([member]), [plain])


LAYOUTS = {
    "contiguous": torch.arange(24.0).reshape(2, 3, 4),
    "0-dim": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last of one channel": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "3-d channels last": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "a slice": torch.arange(12)[5:9],
    "complex slice": torch.randn(5, dtype=torch.complex128)[1:4],
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "one octet in the middle": torch.arange(37, dtype=torch.uint8)[17:18],
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_are_restored_and_other_readers_see_dense_tensors_in_their_own_shape(tensor):
    assert_same_state(through_files({"x": tensor})["x"], tensor)
    (stored,) = encode({"x": tensor}, path="part").tensors.values()
    assert stored.shape == tensor.shape or tensor.is_complex()


def test_a_slice_is_stored_without_the_rest_of_its_storage():
    encoded = encode({"x": torch.zeros(1_000_000)[500:510]}, path="part")
    assert len(written(encoded.tensors)) < 1000


def test_tied_weights_are_stored_once_and_tied_again():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
    model[1].weight = model[0].weight
    state = model.state_dict()
    encoded = encode(state, path="model")
    assert list(encoded.tensors) == ["0.weight"]
    found = through_files(state)
    assert_same_state(found, state)
    found["0.weight"][3, 4] = 7
    assert found["1.weight"][3, 4] == 7


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.tensor([[1.0], [2.0]]).expand(2, 3),
        torch.arange(6.0).unfold(0, 3, 1),
        torch.randn(3, dtype=torch.complex64).imag,
        torch.randn(4, 5, dtype=torch.complex128).t()[::2],
    ],
)
def test_tensors_with_gaps_or_repeats_come_back_contiguous(tensor):
    assert_same_state(through_files({"x": tensor})["x"], tensor.contiguous())


def test_neighbours_in_one_storage_stay_apart():
    flat = torch.arange(10.0)
    encoded = encode({"weight": flat[:6].view(2, 3), "bias": flat[6:]}, path="part")
    assert {name: tuple(tensor.shape) for name, tensor in encoded.tensors.items()} == {"weight": (2, 3), "bias": (4,)}


def test_tensors_with_the_same_place_in_words_keep_different_names():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.full((1,), 2.0)}
    assert_same_state(through_files(state), state)


def test_versions_of_modules_travel_with_their_state_dict():
    state: Any = nn.BatchNorm1d(3).state_dict()
    assert through_files(state)._metadata == state._metadata != {}


class Odd(enum.Enum):
    A = [len]


Point = namedtuple("Point", "x y")
SPARSE = torch.eye(2).to_sparse()
holds_itself: list[Any] = []
holds_itself.append(holds_itself)
REFUSED = {
    "function": (lambda: None, r"is a builtins\.function"),
    "set": ({1}, r"is a builtins\.set"),
    "named tuple": (Point(1, 2), "Point"),
    "defaultdict": (defaultdict(list), "defaultdict"),
    "subclass of tensor": (torch.ones(1).as_subclass(type("MyTensor", (torch.Tensor,), {})), "MyTensor"),
    "sparse tensor": (SPARSE, "sparse_coo"),
    "tensor without data": (torch.empty(2, device="meta"), "meta"),
    "uninitialized parameter": (nn.UninitializedParameter(), "UninitializedParameter"),
    "tensor as key": ({torch.ones(1): 1}, "tensor as a key"),
    "array of text": (np.array(["a"]), "dtype <U1"),
    "array of objects": (np.array([None]), "dtype object"),
    "array in the other byte order": (np.arange(3, dtype=">i4" if np.little_endian else "<i4"), "dtype"),
    "enum of something else": (Odd.A, "builtin_function"),
    "something that holds itself": (holds_itself, "holds itself"),
}


@pytest.mark.parametrize(("value", "complaint"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_everything_else_is_refused_by_its_path(value, complaint):
    with pytest.raises(CheckpointError, match=rf"optimizer\.param_groups\[0\]\.foo.*{complaint}"):
        encode({"param_groups": [{"foo": value}]}, path="optimizer")


def test_all_complaints_come_at_once():
    with pytest.raises(CheckpointError) as caught:
        encode({"a": [len], "b c": {3: {4}}, "good": 1}, path="callbacks")
    assert "callbacks.a[0] is a" in str(caught.value)
    assert "callbacks['b c'][3] is a" in str(caught.value)
    assert "good" not in str(caught.value)


UNKNOWN = {
    "unknown kind": {"$": "pickle", "value": "gASVAAAA"},
    "kind that is a method of the reader": {"$": "decode", "node": 1},
    "missing field": {"$": "tuple"},
    "field too many": {"$": "tuple", "items": [], "more": 1},
    "a number that is none": {"$": "float", "text": "0.5"},
    "hex that is none": {"$": "int", "hex": "0xg"},
    "an unhashable key": {"$": "dict", "items": [[[1], 2]]},
    "an unknown dtype": {"$": "dtype", "name": "Tensor"},
    "an unknown device": {"$": "device", "name": "../../etc"},
    "an array without a tensor": {"$": "array", "value": 3},
    "a tensor that is not there": {"$": "tensor", "name": "y"},
    "a view behind the end": {"$": "view", "name": "x", "dtype": "float32", "offset": 3, "shape": [2], "stride": [1]},
}


@pytest.mark.parametrize("node", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_structures_are_refused_by_their_path(node):
    octets = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(InvalidCheckpointError, match=r"^part\.a\[1\]"):
        decode({"a": [0, node]}, {"x": octets}, path="part")


def tiny_optimizer(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], **options}], lr=0.1)


def test_callables_in_parameter_groups_are_not_stored_and_the_live_ones_stay():
    stored = through_files(without_callables(tiny_optimizer(scale=math.sqrt, name="head").state_dict()))
    live = tiny_optimizer(scale=math.exp, name="head")
    live.load_state_dict(with_callables(stored, live))
    assert live.param_groups[0]["scale"] is math.exp
