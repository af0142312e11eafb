"""Runs on two ranks: what a trainer holds is trained as by one process, is equal on the ranks, and comes back.

Arguments: a folder, in which ``alone.pt`` and ``huggingface.pt`` have the results of one
process.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError
from tests.huggingface.runs import OwnParts, make_trainer
from tests.support import held
from tests.support.resuming import SaveAndStop, assert_same

warnings.simplefilter("error", UserWarning)  # in particular that `self.model` was never called
folder = Path(sys.argv[1])
alone = torch.load(folder / "alone.pt", weights_only=True)


def begin_apart(trainer: Trainer) -> None:
    """Other values on rank 1, which those of rank 0 replace when the run starts."""
    assert trainer._ranks.count == 2
    parts = [trainer.loss_func, *vars(trainer).values(), *getattr(trainer, "heads", {}).values()]
    tensors = [each for part in parts if isinstance(part, nn.Module) for each in part.parameters()]
    for tensor in [*tensors, *(each for each in vars(trainer).values() if isinstance(each, nn.Parameter))]:
        tensor.detach().add_(trainer._ranks.index)


def of_first(trainer: Trainer, values: Any) -> Any:
    everyones = trainer._ranks.exchange(values)
    assert_same(everyones[1], everyones[0])
    return everyones[0]


for case, expected in alone.items():
    name, accumulation, rows = case
    arguments: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "rows": rows, "gradient_clip_norm": 0.5}
    trainer = held.train(name, before=begin_apart, **arguments)
    whole = held.tensors_of(trainer)
    of_first(trainer, whole)
    assert_same(whole, expected, str(case), tolerance=1e-12)
    state = folder / f"{name} {accumulation}"
    held.train(name, SaveAndStop(state, 2), **arguments)
    resumed = held.train(name, resume_from=state, before=begin_apart, **arguments)
    assert_same(held.tensors_of(resumed), whole, str(case))

    # All ranks load what the first one has just written.
    with torch.no_grad():
        trainer.get_model()[0].bias.fill_(accumulation)
    trainer.save_checkpoint(folder / "model.pt", {"blob": torch.zeros(2**20)})
    assert trainer.load_checkpoint(folder / "model.pt")["model_state_dict"]["0.bias"][0] == accumulation


alone = torch.load(folder / "huggingface.pt", weights_only=True)
for accumulation, expected in alone.items():
    face = make_trainer(folder / "run", kind=OwnParts, gradient_accumulation_steps=accumulation)
    face.train()
    assert isinstance(face, OwnParts)
    assert_same(of_first(trainer, face.own_values()), expected, str(accumulation), tolerance=1e-6)


def only_on_first(trainer: Trainer) -> None:
    if trainer._ranks.is_first:
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


with pytest.raises(ConfigurationError, match="rank 1: none"):
    held.train("a target network", before=only_on_first)
torch.distributed.destroy_process_group()
