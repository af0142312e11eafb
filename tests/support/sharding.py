"""The run used by the tests of sharded models, on a sharded or an unsharded model."""

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.extras.activations import checkpoint_activations
from tests.support.reference import regression_data

ROWS = 21  # in batches of 3 on 2 ranks: the last one of an epoch leaves a rank without any sample
EVAL_ROWS = 1


def make_trainer(
    *,
    shards: bool,
    dropout: float = 0.0,
    callbacks: Iterable[TrainerCallback] = (),
    checkpoints_activations: bool = False,
    several_optimizers: bool = False,
) -> Trainer:
    """A float64 model of odd sizes, so that the ranks' shards differ in size and one of them is empty."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(5), nn.Linear(5, 1), nn.Linear(1, 2)
    ).double()
    if checkpoints_activations:
        assert checkpoint_activations(model, "Linear") == 3
    if shards:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        ranks = PartialState(cpu=True, timeout=timedelta(seconds=30))  # a rank that waits longer waits in vain
        mesh = init_device_mesh("cpu", (ranks.num_processes,))
        for layer in (model[0], model[4], model):
            fully_shard(layer, mesh=mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    if several_optimizers:
        body, head = list(model[0].parameters()), [each for layer in list(model)[1:] for each in layer.parameters()]
        optimizer = {"body": torch.optim.SGD(body, lr=0.02, momentum=0.9), "head": torch.optim.AdamW(head, lr=0.02)}
    return Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=3)


def train(trainer: Trainer, *, ranks: int, **arguments: Any) -> Trainer:
    """Three epochs of updates of 12 samples, for any number of ranks."""
    trainer.train(
        regression_data(ROWS),
        num_epochs=3,
        eval_dataset=regression_data(EVAL_ROWS),
        per_device_batch_size=6 // ranks,
        gradient_accumulation_steps=2,
        gradient_clip_norm=0.5,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
        **arguments,
    )
    return trainer


def saver(folder: Path, *, background: bool = False) -> SaveTrainingStateCallback:
    return SaveTrainingStateCallback(folder, save_every_n_steps=1, save_at_end=False, background=background)


def is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def whole(state: Any) -> Any:
    """A state with whole tensors. Must be called by all ranks."""
    return tree_map_only(DTensor, DTensor.full_tensor, state)


def everything(trainer: Trainer) -> dict[str, Any]:
    """The results of a run, gathered from the ranks. Must be called by all of them."""
    return {
        "model": dict(whole(trainer.get_model().state_dict())),
        "optimizer": whole(trainer.optimizer.state_dict()),
        "history": {
            name: trainer.run_history.get_metric_values(name) for name in sorted(trainer.run_history.get_metric_names())
        },
        "predictions": trainer.predict(regression_data(7)[0], per_device_batch_size=2),
    }
