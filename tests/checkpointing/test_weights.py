import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from pytorch_accelerated.errors import InvalidCheckpointError, NonFiniteLossError
from pytorch_accelerated.states.weights import canonical_state_dict, check_finite, load_canonical
from tests.checkpointing.same_state import assert_same_state


class Versioned(nn.Module):
    """Its states of version 1 were half as large."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Net(nn.Module):
    """With a submodule that is really called ``module``, and one that is really called ``_orig_mod``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.ModuleDict({"module": nn.Linear(3, 1), "_orig_mod": nn.Linear(1, 1)})
        self.versioned = Versioned()


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")  # the names are the same, without the wait for the default backend


def compiled_in_place(net: Net) -> nn.Module:
    net.compile(backend="eager")
    return net


def with_checkpointed_parts(net: Net) -> nn.Module:
    net.module[1] = checkpoint_wrapper(net.module[1])
    return net


def with_compiled_parts(net: Net) -> nn.Module:
    net.module[0] = compiled(net.module[0])
    net.head["module"] = compiled(net.head["module"])
    return net


class MyParallel(DataParallel):  # type: ignore[type-arg]
    """A wrapper of a user's."""


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "bare": lambda net: net,
    "data parallel": DataParallel,
    "subclass": MyParallel,
    "distributed": DistributedDataParallel,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "compiled, then distributed": lambda net: DistributedDataParallel(compiled(net)),
    "distributed, then compiled": lambda net: compiled(DistributedDataParallel(net)),
    "checkpointed parts": with_checkpointed_parts,
    "compiled parts": with_compiled_parts,
    "compiled parts, then distributed": lambda net: DistributedDataParallel(with_compiled_parts(net)),
}


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_and_versions_are_those_of_the_bare_model_and_load_back(wrap):
    bare = Net()
    wrapped = wrap(copy.deepcopy(bare))
    state = canonical_state_dict(wrapped)
    assert_same_state(state, bare.state_dict())

    other = Net()
    load_canonical(other, state)
    assert_same_state(other.state_dict(), bare.state_dict())

    third = Net()
    load_canonical(wrapped, third.state_dict())
    assert_same_state(canonical_state_dict(wrapped), third.state_dict())


def test_modules_that_only_look_like_a_wrapper_keep_their_names():
    namesake = type("DataParallel", (Net,), {})()
    assert list(canonical_state_dict(namesake)) == list(Net().state_dict())
    averaged = AveragedModel(Net())
    assert list(canonical_state_dict(averaged)) == ["n_averaged", *(f"module.{name}" for name in Net().state_dict())]


def test_tied_weights_keep_both_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    wrapped = DataParallel(model)
    assert list(canonical_state_dict(wrapped)) == list(model.state_dict())
    load_canonical(wrapped, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict())


def test_all_differences_are_named_and_nothing_is_loaded():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = copy.deepcopy(model.state_dict())
    state = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)).state_dict()
    del state["0.bias"]
    state["2.weight"] = torch.ones(1)
    with pytest.raises(InvalidCheckpointError, match="Sequential; nothing was loaded") as caught:
        load_canonical(model, state)
    assert set(str(caught.value).splitlines()[1:-1]) == {
        "  missing: 0.bias",
        "  unexpected: 2.weight",
        "  1.weight: saved as a tensor (4, 3), the model has a tensor (1, 3)",
        "  1.bias: saved as a tensor (4,), the model has a tensor (1,)",
    }
    assert_same_state(model.state_dict(), before)


class Adapted(nn.Module):
    """Its base is frozen and not part of its state, as many models with an adapter have it."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "base" not in name}


class Renaming(Adapted):
    """Saves under other names than its parameters have."""

    def state_dict(self, *args, **kwargs):
        return {f"my_{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


class RenamingBack(Renaming):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({name[3:]: value for name, value in state_dict.items()}, strict=False)


@pytest.mark.parametrize("kind", [Adapted, RenamingBack])
def test_a_model_may_override_state_dict_and_load_state_dict(kind):
    saved, model = kind(), kind()
    base = copy.deepcopy(model.base.state_dict())
    load_canonical(model, canonical_state_dict(saved))
    assert_same_state(model.head.state_dict(), saved.head.state_dict())
    assert_same_state(model.base.state_dict(), base)


def test_own_names_that_nothing_takes_back_are_refused():
    with pytest.raises(InvalidCheckpointError, match=r"names my_head.weight, my_head.bias, which no parameter"):
        load_canonical(Renaming(), canonical_state_dict(Renaming()))


def test_an_error_about_many_weights_names_the_first_ones():
    state = {f"layer.{number}": torch.ones(1) for number in range(100_000)}
    with pytest.raises(InvalidCheckpointError, match=r"(?s)missing: weight\n.*layer\.17\n  and 99982 more\n") as caught:
        load_canonical(nn.Linear(1, 1), state)
    assert len(str(caught.value)) < 2000


def test_other_kinds_of_numbers_do_not_fit():
    model = nn.Linear(2, 1)
    state = {name: tensor.long() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidCheckpointError, match=r"weight: saved with torch\.int64, the model has torch\.float32"):
        load_canonical(model, state)
    halves = {name: tensor.half() for name, tensor in model.state_dict().items()}
    load_canonical(model, halves)
    assert torch.equal(model.weight, halves["weight"].float())


@pytest.mark.parametrize("state", [3, [], None, "weight"])
def test_an_object_that_is_not_a_state_dict_is_rejected(state):
    with pytest.raises(InvalidCheckpointError, match="not a dict of tensors"):
        load_canonical(nn.Linear(2, 1), state)


def test_lazy_parameters_take_their_shape_from_the_state():
    state = nn.Linear(4, 2).state_dict()
    lazy = nn.LazyLinear(2)
    load_canonical(lazy, state)
    assert_same_state(lazy.state_dict(), state)


# Finite or not.


DTYPES = [torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 5, 39])
def test_one_bad_value_among_many_is_found_and_named(value, dtype, position):
    parameters = [(f"layer.{index}", torch.ones(40, dtype=torch.float32)) for index in range(3)]
    bad = torch.ones(40, dtype=dtype)
    bad[position] = value
    with pytest.raises(NonFiniteLossError, match=r"in 1 of 4 parameters: 'head\.weight'\."):
        check_finite([*parameters, ("head.weight", bad)])


def test_finite_parameters_of_every_kind_pass():
    largest = [torch.full((1000,), torch.finfo(dtype).max, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    others = [torch.empty(0), torch.tensor([1, 2]), torch.tensor([True]), torch.ones(3).to(torch.float8_e4m3fn)]
    check_finite([(str(index), tensor) for index, tensor in enumerate([*largest, *others])])
    check_finite([])
    check_finite([("empty", torch.empty(0))])
    check_finite(nn.Linear(2, 2).named_parameters())
