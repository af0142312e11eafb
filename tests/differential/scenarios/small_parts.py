"""Freezing, averaging, loss tracking and the utilities, each alone."""

import os
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.finetuning import ModelFreezer
from pytorch_accelerated.utils import LIMIT_BATCHES_ENV_VAR, DataLoaderSlice, LimitBatches, ModelEma
from tests.differential.scenarios.common import attempt, grid, plain, train, trainer, weights_of


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
        self.scale = nn.Parameter(torch.ones(1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 2)


def _network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {
        "backbone": _Backbone,
        "sequential": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 1)),
        "one layer": lambda: nn.Linear(2, 2),
    }[kind]()


def _state(network: nn.Module) -> Any:
    return {
        "trainable": {name: parameter.requires_grad for name, parameter in network.named_parameters()},
        "modes": {name or "model": module.training for name, module in network.named_modules()},
    }


def freezing() -> Any:
    def run(kind: str, freeze_batch_norms: bool = False, freeze: Any = None, unfreeze: Any = None) -> Any:
        network = _network(kind)
        freezer = ModelFreezer(network, freeze_batch_norms=freeze_batch_norms)
        seen: dict[str, Any] = {
            "groups": [type(group.module).__name__ for group in freezer.get_layer_groups()],
            "group indices": [group.layer_group_idx for group in freezer.get_layer_groups()],
            "fields of a group": list(freezer.get_layer_groups()[0]._fields),
            "layers": [type(layer.module).__name__ for layer in freezer.get_layers()],
            "fields of a layer": list(freezer.get_layers()[0]._fields),
        }
        if freeze is not None:
            seen["what freeze returns"] = attempt(lambda: freezer.freeze(**freeze))
            seen["frozen"] = _state(network)
            seen["groups' flags"] = [group.is_frozen for group in freezer.get_layer_groups()]
            seen["layers' flags"] = [layer.is_frozen for layer in freezer.get_layers()]
            seen["trainable parameters"] = len(list(freezer.get_trainable_parameters()))
        if unfreeze is not None:
            returned = attempt(lambda: freezer.unfreeze(**unfreeze))
            seen["what unfreeze returns"] = returned
            seen["unfrozen"] = _state(network)
            seen["groups' flags after that"] = [group.is_frozen for group in freezer.get_layer_groups()]
        return seen

    cases: dict[str, Any] = {}
    for kind in ("backbone", "sequential", "one layer"):
        cases[kind] = {"kind": kind}
        cases[f"{kind}, frozen"] = {"kind": kind, "freeze": {}}
        cases[f"{kind}, frozen with batch norms"] = {"kind": kind, "freeze": {}, "freeze_batch_norms": True}
        cases[f"{kind}, frozen as evaluation"] = {"kind": kind, "freeze": {"set_modules_as_eval": True}}
        cases[f"{kind}, all frozen"] = {"kind": kind, "freeze": {"to_index": -1}}
        cases[f"{kind}, frozen to 1"] = {"kind": kind, "freeze": {"from_index": 0, "to_index": 1}}
        cases[f"{kind}, one frozen"] = {"kind": kind, "freeze": {"from_index": 1, "to_index": 1}}
        cases[f"{kind}, unfrozen"] = {"kind": kind, "freeze": {"to_index": -1}, "unfreeze": {}}
        cases[f"{kind}, head unfrozen"] = {"kind": kind, "freeze": {"to_index": -1}, "unfreeze": {"to_index": -1}}
        cases[f"{kind}, last two unfrozen"] = {
            "kind": kind,
            "freeze": {"to_index": -1},
            "unfreeze": {"from_index": -1, "to_index": -2},
        }
        cases[f"{kind}, index too large"] = {"kind": kind, "freeze": {"from_index": 0, "to_index": 99}}
    return grid(run, cases)


def averaging() -> Any:
    norm = nn.BatchNorm1d(2)
    average = ModelEma(norm, decay=0.5)
    norm(torch.arange(8.0).reshape(4, 2))
    average.update(norm)
    averaged = {name: plain(value) for name, value in average.module.state_dict().items()}
    return {"batch norm": averaged, "mode": average.module.training, "decay": average.decay}


def slices() -> Any:
    loader = torch.utils.data.DataLoader(range(10), batch_size=2)
    part = DataLoaderSlice(loader, 3)
    return {
        "batches": attempt(lambda: [batch.tolist() for batch in part]),
        "again": attempt(lambda: [batch.tolist() for batch in part]),
        "length": attempt(lambda: len(part)),
        "batch_size": attempt(lambda: part.batch_size),
        "longer than the loader": attempt(lambda: len(list(DataLoaderSlice(loader, 50)))),
    }


def limits() -> Any:
    """`LimitBatches`, nested and repeated, and the environment variable that it stands for."""
    seen: dict[str, Any] = {"name": LIMIT_BATCHES_ENV_VAR}

    def nested() -> Any:
        with LimitBatches(1):
            values = [os.environ.get(LIMIT_BATCHES_ENV_VAR)]
            with LimitBatches(2):
                values.append(os.environ.get(LIMIT_BATCHES_ENV_VAR))
            values.append(os.environ.get(LIMIT_BATCHES_ENV_VAR))
        return [*values, os.environ.get(LIMIT_BATCHES_ENV_VAR)]

    def limited() -> Any:
        with LimitBatches(1):
            made = trainer()
        return weights_of(train(made).model)

    def limited_in_its_run() -> Any:
        made = trainer()
        with LimitBatches(1):
            return weights_of(train(made).model)

    for name, call in {"made inside": limited, "trained inside": limited_in_its_run, "nested": nested}.items():
        seen[name] = attempt(call)
        os.environ.pop(LIMIT_BATCHES_ENV_VAR, None)
    os.environ[LIMIT_BATCHES_ENV_VAR] = "2"
    try:
        seen["from the environment"] = attempt(lambda: weights_of(train(trainer()).model))
    finally:
        os.environ.pop(LIMIT_BATCHES_ENV_VAR, None)
    return seen
