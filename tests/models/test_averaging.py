import copy
import math
import pickle

import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks.averaging import ModelEma, ShardedEma
from tests.support.waiting import no_waiting


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def train(model, updates, after_update, first_row=0):
    """Train for real on 16 rows, and call `after_update` after each update."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 4, generator=generator) + 2
    targets = inputs.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for update in range(updates):
        start = (first_row + 4 * update) % 16
        rows = slice(start, start + 4)
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_update()


def entries(model):
    return {name: entry.clone() for name, entry in model.state_dict().items()}


def average(ema, name):
    return ema.module.state_dict()[name]


def averaged_while_training(model, ema, updates):
    """What the model was at the start and after each update."""
    snapshots = [entries(model)]

    def after_update():
        ema.update(model)
        snapshots.append(entries(model))

    train(model, updates, after_update)
    return snapshots


class LargestSoFar(ModelEma):
    def update_fn(self, ema_value, model_value):
        return torch.maximum(ema_value, model_value)


def test_an_overridden_rule_is_applied_to_every_averaged_entry():
    model = make_model()
    snapshots = averaged_while_training(model, ema := LargestSoFar(model), 5)
    for name, entry in ema.module.state_dict().items():
        assert torch.equal(entry, torch.stack([snapshot[name] for snapshot in snapshots]).amax(0)), name


def test_the_rule_for_one_entry_agrees_with_the_update_of_all():
    class OneByOne(ModelEma):
        def update_fn(self, ema_value, model_value):
            return super().update_fn(ema_value, model_value)

    model = make_model()
    at_once, one_by_one = ModelEma(model, decay=0.7), OneByOne(model, decay=0.7)
    train(model, 5, lambda: (at_once.update(model), one_by_one.update(model)))
    for name, entry in at_once.module.state_dict().items():
        torch.testing.assert_close(one_by_one.module.state_dict()[name], entry, rtol=0, atol=0)


@pytest.mark.parametrize("decay", [-0.1, 1, 1.5, math.nan])
def test_decay_outside_its_range_is_refused(decay):
    with pytest.raises(ConfigurationError, match="decay must be in"):
        ModelEma(make_model(), decay=decay)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head


def test_shared_weights_are_averaged_once_and_stay_shared():
    model = Tied()
    ema = ModelEma(model, decay=0.5)
    with torch.no_grad():
        start = model.embedding.weight.clone()
        model.embedding.weight.add_(1)
    ema.update(model)
    assert ema.module.get_parameter("head.weight") is ema.module.get_parameter("embedding.weight")
    torch.testing.assert_close(average(ema, "head.weight"), start + 0.5)


class Masked(nn.Module):
    mask: torch.Tensor
    table: torch.Tensor
    scratch: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.offset = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
        self.register_buffer("mask", torch.triu(torch.full((3, 3), -math.inf), 1))
        self.register_buffer("table", torch.rand(10))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("nothing", None)
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def test_infinite_masks_are_copied_complex_entries_averaged_and_buffers_that_are_not_persistent_left_alone():
    model = Masked()
    ema = ModelEma(model, decay=0.75)
    with torch.no_grad():
        model.phase.add_(4 + 8j)
        model.scratch.add_(1)
    ema.update(model)
    assert torch.equal(average(ema, "phase"), torch.full((2,), 1 + 2j))
    assert ema.module.get_buffer("scratch").item() == 0
    assert torch.equal(average(ema, "mask"), model.mask)
    assert torch.equal(average(ema, "offset"), model.offset)


def test_a_float32_average_follows_a_bfloat16_model_where_a_bfloat16_average_does_not_move():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    coarse, fine = ModelEma(model, decay=0.999), ModelEma(model, decay=0.999).float()
    nn.init.constant_(model.weight, 2)
    for _ in range(100):
        coarse.update(model)
        fine.update(model)
    assert average(coarse, "weight").item() == 1
    assert average(fine, "weight").dtype is torch.float32
    assert average(fine, "weight").item() == pytest.approx(2 - 0.999**100, rel=100 * 2.0**-23)  # 100 roundings
    fine.set(model)
    assert average(fine, "weight").item() == 2


def test_models_and_averages_that_are_converted_between_updates_are_followed():
    model = make_model()
    ema = ModelEma(model, decay=0.5)
    ema.update(model)
    ema.double()
    with torch.no_grad():
        model[0].weight.add_(1)
    ema.update(model)
    torch.testing.assert_close(average(ema, "0.weight"), (model[0].weight - 0.5).double())
    model.double()
    ema.update(model)
    torch.testing.assert_close(average(ema, "0.weight"), model[0].weight - 0.25, rtol=1e-6, atol=1e-6)


def reassign_weight(model):
    model[0].weight = nn.Parameter(torch.ones(8, 4))


def replace_layer(model):
    model[3] = nn.Linear(8, 1)


def reassign_buffer(model):
    model[1].running_mean = torch.full((8,), 3.0)


def delete_and_set(model):
    del model[3].bias
    model[3].bias = nn.Parameter(torch.full((1,), 5.0))


@pytest.mark.parametrize("change", [reassign_weight, replace_layer, reassign_buffer, delete_and_set])
def test_what_is_replaced_between_updates_is_followed(change):
    model = make_model()
    ema = ModelEma(model, decay=0.5)
    ema.update(model)
    change(model)
    before = entries(ema.module)
    ema.update(model)
    for name, entry in model.state_dict().items():
        expected = (before[name] + entry) / 2 if entry.is_floating_point() else entry
        torch.testing.assert_close(average(ema, name), expected)


def test_a_changed_structure_is_an_error_that_names_every_difference():
    model = make_model()
    ema = ModelEma(model)
    ema.update(model)
    model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
    model[3] = nn.Linear(8, 2, bias=False)
    before = entries(ema.module)
    with pytest.raises(ConfigurationError) as caught:
        ema.update(model)
    for part in ["'0.scale' was missing", "'3.bias' was [1] and is missing", "'3.weight' was [1, 8] and is [2, 8]"]:
        assert part in str(caught.value)
    for name, entry in ema.module.state_dict().items():
        assert torch.equal(entry, before[name])


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, lambda model: nn.Sequential(*map(compiled, model))])
def test_compiled_models_and_layers_are_matched_by_their_own_names(wrap):
    model = make_model()
    wrapped = wrap(model)
    ema = ModelEma(model, decay=0.5)
    made_of_wrapped = ModelEma(wrapped, decay=0.5)
    assert type(made_of_wrapped.module) is nn.Sequential
    train(model, 2, lambda: (ema.update(wrapped), made_of_wrapped.update(model)))
    for (name, entry), other in zip(
        ema.module.state_dict().items(), made_of_wrapped.module.state_dict().values(), strict=True
    ):
        assert torch.equal(entry, other), name


class NamedModule(nn.Module):
    """The key that wrappers use may as well be an attribute of a user's model."""

    def __init__(self):
        super().__init__()
        self.module = make_model()

    def forward(self, inputs):
        return self.module(inputs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ema: pickle.loads(pickle.dumps(ema))])
def test_a_copy_of_the_average_can_be_updated_on_its_own(copied):
    model = make_model()
    ema = ModelEma(model, decay=0.5)
    train(model, 1, lambda: ema.update(model))
    other = copied(ema)
    before = average(ema, "0.weight").clone()
    train(model, 1, lambda: other.update(model))
    assert torch.equal(average(ema, "0.weight"), before)
    torch.testing.assert_close(average(other, "0.weight"), (before + model[0].weight) / 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_update_on_a_gpu_does_not_wait_and_agrees_with_the_cpu():
    model = make_model()
    on_cpu = ModelEma(model, decay=0.5)
    on_gpu = ModelEma(model, decay=0.5)
    on_gpu.update(model)
    on_cpu.update(model)
    model.cuda()
    on_gpu.cuda()
    with torch.no_grad():
        model[0].weight.add_(1)
    with no_waiting():
        on_gpu.update(model)
        on_gpu.update(model)
    on_cpu.update(model)
    on_cpu.update(model)
    for name, entry in on_cpu.module.state_dict().items():
        torch.testing.assert_close(on_gpu.module.state_dict()[name].cpu(), entry)


def test_an_average_in_place_has_the_values_of_a_copied_one() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            self.register_buffer("count", torch.tensor(0))

    torch.manual_seed(0)
    model = Odd()
    copied, in_place = ModelEma(model, 0.5), ShardedEma(model, 0.5)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
            model.get_buffer("count").add_(1)
        copied.update(model)
        in_place.update(model)
    current = {name: value.clone() for name, value in model.state_dict().items()}
    with in_place.in_place_of(model):
        for name, value in copied.module.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    for name, value in current.items():
        assert torch.equal(model.state_dict()[name], value), name
