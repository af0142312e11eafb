import pytest
import torch
from torch import nn

from pytorch_accelerated.finetuning import ModelFreezer


class Scale(nn.Module):
    """Holds a parameter itself beside a child that holds others."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.inner(inputs) * self.gain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.full((4,), 0.1))
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.norm = nn.BatchNorm1d(4)
        self.scale = Scale()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.head(self.drop(self.scale(self.norm(self.stem(inputs + self.token)))))


def make_net():
    torch.manual_seed(0)
    return Net()


def train(model, optimizer, updates=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        inputs = torch.randn(8, 4, generator=generator) + 1
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def entries(model):
    return {name: entry.clone() for name, entry in model.state_dict().items()}


def changed(model, before):
    return {name for name, entry in model.state_dict().items() if not torch.equal(entry, before[name])}


def names_of(model, parameters):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in parameters}


def parameter_names(model):
    return {name for name, _ in model.named_parameters()}


HEAD = {"head.weight", "head.bias"}
NORMS = {"stem.1.weight", "stem.1.bias", "norm.weight", "norm.bias"}
STATISTICS = {
    f"{norm}.{name}" for norm in ("stem.1", "norm") for name in ("running_mean", "running_var", "num_batches_tracked")
}


def test_a_module_with_an_empty_child_is_not_a_layer_and_a_shared_one_is_listed_once():
    shared = nn.Linear(2, 2)
    block = nn.Module()
    block.add_module("shortcut", nn.Sequential())
    model = nn.Sequential(block, shared, nn.Sequential(shared, nn.ReLU()))
    layers = ModelFreezer(model).get_layers()
    assert [layer.module for layer in layers] == [block.shortcut, shared, model.get_submodule("2.1")]
    assert [layer.layer_group_idx for layer in layers] == [(0, -3), (1, -2), (2, -1)]


def test_parameters_held_by_modules_with_children_are_frozen_and_unfrozen_with_them():
    model = make_net()
    freezer = ModelFreezer(model)
    freezer.freeze(2, 2)
    held = {"scale.gain", "scale.inner.weight", "scale.inner.bias"}
    assert parameter_names(model) - names_of(model, freezer.get_trainable_parameters()) == held
    assert names_of(model, freezer.unfreeze(2, 2)[2]["params"]) == held


def test_parameters_held_by_the_model_itself_belong_to_the_first_group():
    model = make_net()
    freezer = ModelFreezer(model)
    freezer.freeze(1, -1)
    assert model.token.requires_grad
    freezer.freeze(0, 0)
    assert not model.token.requires_grad
    assert names_of(model, freezer.unfreeze(0, 0)[0]["params"]) == {"token", "stem.0.weight", "stem.0.bias"}


def test_batch_norms_stay_trainable_by_default_and_keep_their_statistics_moving():
    model = make_net()
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    assert names_of(model, freezer.get_trainable_parameters()) == HEAD | NORMS
    assert model.norm.training
    assert model.stem[1].training
    assert not model.stem.training
    assert not model.drop.training
    assert model.head.training
    before = entries(model)
    train(model, make_optimizer(freezer.get_trainable_parameters()))
    assert changed(model, before) == HEAD | NORMS | STATISTICS
    # Frozen as well, and in evaluation mode, they keep their statistics, too.
    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze(set_modules_as_eval=True)
    before = entries(model)
    train(model, make_optimizer(freezer.get_trainable_parameters()))
    assert changed(model, before) == HEAD


def test_unfreezing_without_setting_modules_to_training_unfreezes_as_well():  # rough edge 13
    model = make_net()
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    freezer.unfreeze(-1, 0, False)
    assert names_of(model, freezer.get_trainable_parameters()) == parameter_names(model)
    assert not model.stem.training


def test_a_shared_parameter_is_frozen_with_either_group_and_returned_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["embedding"].weight
    freezer = ModelFreezer(model)
    freezer.freeze()
    assert names_of(model, freezer.get_trainable_parameters()) == {"head.bias"}
    unfrozen = freezer.unfreeze()
    assert {index: names_of(model, group["params"]) for index, group in unfrozen.items()} == {
        0: {"embedding.weight"},
        1: {"body.weight", "body.bias"},
    }
    optimizer = make_optimizer([model.get_parameter("head.bias")])
    for group in unfrozen.values():
        optimizer.add_param_group(group)


def test_groups_without_parameters_count_as_frozen_and_are_never_returned():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU())
    freezer = ModelFreezer(model)
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, False, True]
    freezer.freeze(0, -1)
    assert freezer.get_trainable_parameters() == []
    assert freezer.unfreeze().keys() == {1}


def test_a_group_of_batch_norms_that_stay_trainable_is_not_called_frozen():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 1))
    freezer = ModelFreezer(model)
    freezer.freeze()
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [False, True, False]
    assert [layer.is_frozen for layer in freezer.get_layers()] == [False, True, False, False]


def test_integer_parameters_are_left_alone():
    model = nn.Sequential(nn.Module(), nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    freezer = ModelFreezer(model)
    freezer.freeze()
    assert freezer.unfreeze() == {}


@pytest.mark.parametrize("ends", [(0, 5), (-6, 0), (5, 5)])
def test_an_index_without_a_group_is_an_error_that_changes_nothing(ends):
    model = make_net()
    freezer = ModelFreezer(model)
    for method in (freezer.freeze, freezer.unfreeze):
        with pytest.raises(IndexError, match="Net, and it has 5"):
            method(*ends)
    assert names_of(model, freezer.get_trainable_parameters()) == parameter_names(model)
