"""What an optimizer trains outside of the model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks.held import held_parts, refuse_outside, trained_outside
from tests.support.reference import tiny_model


def test_parameters_outside_of_the_model_are_refused_where_a_library_takes_the_optimizer_apart() -> None:
    model, own = tiny_model(), nn.Parameter(torch.ones(3))
    trainer: Any = Trainer(model, nn.MSELoss(), torch.optim.AdamW([*model.parameters(), own]), callbacks=())
    trainer.own = own
    outside = trained_outside(trainer, held_parts(trainer))
    one_process: Any = SimpleNamespace(distributed_type=DistributedType.NO)
    refuse_outside(outside, one_process, trainer.model, trainer._ranks)
    for kind in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        accelerator: Any = SimpleNamespace(distributed_type=kind)
        with pytest.raises(ConfigurationError, match="not the model's: own"):
            refuse_outside(outside, accelerator, trainer.model, trainer._ranks)
