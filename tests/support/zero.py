"""The run used by the tests of DeepSpeed's engine."""

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.ranks import whole
from pytorch_accelerated.ranks.accelerators import create_accelerator
from pytorch_accelerated.states import canonical_state_dict
from tests.support.reference import regression_data

ROWS = 235  # in 20 updates of 12 rows on 2 ranks: the last one of an epoch is short, and one of its batches as well
EVAL_ROWS = 5


def accelerator_with(config: dict[str, Any]) -> Callable[[], Any]:
    """What makes an Accelerator with a config of DeepSpeed."""
    from accelerate import DeepSpeedPlugin

    return lambda: create_accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def allow_float16_on_the_cpu() -> None:
    """DeepSpeed asks whether the processor computes fast in float16, which doesn't matter in tests."""
    device: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if device.device_name() == "cpu":
        device.is_fp16_supported = lambda: True
        device.supported_dtypes = lambda: [torch.float, torch.half, torch.bfloat16]


def config(stage: int, **sections: Any) -> dict[str, Any]:
    zero = {"stage": stage, **sections.pop("zero_optimization", {})}
    return {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero, **sections}


def make_model(dropout: float = 0.1) -> nn.Sequential:
    """A model of odd sizes, so that the ranks' parts differ in size."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Dropout(dropout), nn.Linear(5, 1), nn.Linear(1, 2)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups."""
    layers: Any = model
    groups: list[dict[str, Any]] = [
        {"params": [*layers[0].parameters()]},
        {"params": [*layers[2:].parameters()], "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def make_trainer(
    settings: dict[str, Any] | None,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    optimizer: Any = None,
    base: type[Trainer] = Trainer,
    accelerator: Callable[[], Any] | None = None,
) -> Trainer:
    """A trainer with a config of DeepSpeed, or on plain DDP."""
    model = make_model() if model is None else model
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    made = accelerator if settings is None else accelerator_with(settings)
    return base(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=3, accelerator=made)


def data(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = regression_data(rows)
    return inputs.float(), targets.float()


def train(trainer: Trainer, epochs: int = 3, ranks: int = 2, **arguments: Any) -> Trainer:
    """Epochs of 19 updates of 12 rows and a last one of 7, in batches of 3 on two ranks."""
    settings = {
        "create_scheduler_fn": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9),
        "gradient_clip_norm": 0.5,
        **arguments,
    }
    trainer.train(
        data(),
        num_epochs=epochs,
        eval_dataset=data(EVAL_ROWS),
        per_device_batch_size=6 // ranks,
        gradient_accumulation_steps=2,
        **settings,
    )
    return trainer


def saver(folder: Path, **arguments: Any) -> SaveTrainingStateCallback:
    return SaveTrainingStateCallback(folder, save_every_n_steps=6, save_at_end=False, **arguments)


def everything(trainer: Trainer, without: Iterable[str] = ()) -> dict[str, Any]:
    """The results of a run; of tensors in pieces, those of the first rank. Must be called by all ranks."""
    names = sorted(set(trainer.run_history.get_metric_names()) - set(without))
    return {
        "model": dict(whole(canonical_state_dict(trainer.get_model()))),
        "history": {name: trainer.run_history.get_metric_values(name) for name in names},
        "predictions": trainer.predict(data(7)[0], per_device_batch_size=2),
    }
