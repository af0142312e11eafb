"""Proves that this checkout trains to the same bits as another one.

    python scripts/same_bits.py OTHER_CHECKOUT [--processes 1,2] [--only WORD]

Both checkouts train the configurations below, on one process and on two that meet as under torchrun: tiny models, a few
updates each, through the public names of both faces. A configuration is the same if the last parameters, the states of
optimizer and scheduler, all recorded losses and the order of events are equal on every rank. Exits with 1 if one
differs, or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pytorch_accelerated.huggingface as face
from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    StopAtCallback,
    StopTrainingError,
    TrainerCallback,
)
from pytorch_accelerated.schedulers import CosineLrScheduler, WSDLrScheduler

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_SECONDS = 600
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
ROWS = 22
#: Words of recorded names that no two runs have in common.
CLOCK = ("second", "time", "wait", "memory", "ranks")  # `ranks` in a step record: how long each one took


# ------------------------------------------------------------------------------------------------------------ the data


def table(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets in memory; the first rows are the same for every size."""
    values = torch.randn(rows, 5, generator=torch.Generator().manual_seed(17))
    return values[:, :3].clone(), values[:, 3:].clone()


class Rows(Dataset[Any]):
    """Rows one by one; augmented ones with noise of all generators that user code draws from."""

    def __init__(self, rows: int = ROWS, *, is_augmented: bool = False, as_dict: bool = False) -> None:
        self.inputs, self.targets = table(rows)
        self.is_augmented = is_augmented
        self.as_dict = as_dict

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.inputs[index], self.targets[index]
        if self.is_augmented:
            inputs = inputs + 0.1 * (torch.rand(3) + np.random.rand() + random.random())
        return {"x": inputs, "labels": targets} if self.as_dict else (inputs, targets)


class Stream(IterableDataset[Any]):
    """The same rows without a length, for all ranks alike."""

    def __init__(self, rows: int = ROWS, **options: Any) -> None:
        self.rows = Rows(rows, **options)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


def held_out() -> Any:
    """Rows to evaluate on."""
    return table(7)


def rows_in_dicts() -> Any:
    """The rows as batches of the other face have them."""
    return Rows(as_dict=True)


class Batches:
    """Batches of different sizes that are ready, those of this rank."""

    def __iter__(self) -> Iterator[Any]:
        parts = (values.split([3, 4, 2, 5, 4, 4]) for values in table())
        return iter(list(zip(*parts, strict=True))[RANK::RANKS])


def own_loader(**options: Any) -> Callable[[], DataLoader[Any]]:
    """A loader as a user makes it."""
    return lambda: DataLoader(Rows(), batch_size=4, generator=torch.Generator().manual_seed(3), **options)


# ---------------------------------------------------------------------------------------------------------- the models


def network(dropout: float = 0.0, outputs: int = 2) -> nn.Module:
    """A small network, the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, outputs))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with a state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Small(nn.Module):
    """A network that rejects more than two rows at a time in training, as if there were no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and len(inputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


class Regression(nn.Module):
    """Returns loss and outputs, as models of `transformers` do; takes the number of items if it is `counting`."""

    def __init__(self, dropout: float = 0.0, *, is_counting: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 2))
        self.accepts_loss_kwargs = is_counting

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.inner(x)
        if labels is None:
            return (outputs,)
        errors = (outputs - labels).square()
        return errors.sum() / kwargs.get("num_items_in_batch", errors.numel()), outputs


# -------------------------------------------------------------------------------------------------------- the trainers


class Events(TrainerCallback):
    """Notes the order of events, with the losses of batches."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


def _native_event(name: str) -> Any:
    def method(self: Events, trainer: Trainer, **kwargs: Any) -> None:
        output = kwargs.get("batch_output")
        self.seen.append((name, None if output is None else output["loss"].item()))

    return method


for _name in [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_stop_training_error"]:
    setattr(Events, _name, _native_event(_name))


class FaceEvents(face.TrainerCallback):
    """Notes the order of events of the other face, with the step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


def _face_event(name: str) -> Any:
    def method(self: FaceEvents, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((name, state.global_step, sorted(flag for flag, is_set in vars(control).items() if is_set)))

    return method


for _name in [name for name in dir(face.TrainerCallback) if name.startswith("on_")]:
    setattr(FaceEvents, _name, _face_event(_name))


class Interrupt(TrainerCallback):
    """Saves after some updates and ends the run there, as a kill would."""

    def __init__(self, folder: Path, updates: int) -> None:
        self.folder = folder
        self.updates = updates

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.updates:
            trainer.save_training_state(self.folder)
            raise StopTrainingError


class FaceInterrupt(face.TrainerCallback):
    """The same for the other face."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == self.step


class StopAfterEpoch(TrainerCallback):
    """Ends the run after its first epoch."""

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError


class DictTrainer(Trainer):
    """Batches that are dicts, for a model that takes their inputs."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch["x"])
        loss = self.loss_func(outputs, batch["labels"])  # type: ignore[misc]
        return {"loss": loss, "model_outputs": outputs, "batch_size": len(batch["x"])}

    calculate_eval_batch_loss = calculate_train_batch_loss


def _masked_loss(trainer: Trainer, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    errors = (trainer.model(inputs) - targets).square().mean(-1)[targets[:, 0] > -0.8]
    loss = errors.sum() / max(1, len(errors))
    return {"loss": loss, "model_outputs": None, "batch_size": len(inputs)}


class CountsItems(Trainer):
    """Losses that are means over some of the rows, counted beforehand."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return _masked_loss(self, batch)

    calculate_eval_batch_loss = calculate_train_batch_loss

    def count_batch_items(self, batch: Any) -> int:
        return int((batch[1][:, 0] > -0.8).sum())


class CountsLate(Trainer):
    """The same, counted by the hook that computes the loss."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {**_masked_loss(self, batch), "num_items_in_batch": int((batch[1][:, 0] > -0.8).sum())}

    calculate_eval_batch_loss = calculate_train_batch_loss


class NaNLosses(Trainer):
    """Two batches, counted over all epochs, have a loss that is NaN."""

    count = 0

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.count += 1
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * float("nan")} if self.count in (4, 7) else output


class LearntScale(Trainer):
    """The loss has a parameter, which the trainer holds and the optimizer trains."""

    def __init__(self, model: nn.Module, loss_func: Any, optimizer: Any, **options: Any) -> None:
        self.scale = nn.Parameter(torch.zeros(()))
        optimizer.add_param_group({"params": [self.scale]})
        super().__init__(model, loss_func, optimizer, **options)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * torch.exp(-self.scale) + self.scale}


class OwnLoss(face.Trainer):
    """The other face with a loss of its own, that has a parameter on the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.zeros(()))

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args)
        optimizer.add_param_group({"params": [self.scale], "weight_decay": 0.0})
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(inputs["x"])[0]
        loss = (outputs - inputs["labels"]).abs().mean() * torch.exp(-self.scale) + self.scale
        return (loss, (loss, outputs)) if return_outputs else loss


# ---------------------------------------------------------------------------------------------------------------- runs


def run_native(
    folder: Path,
    *,
    kind: type[Trainer] = Trainer,
    model: Callable[[], nn.Module] = network,
    optimizer: Callable[..., torch.optim.Optimizer] = momentum,
    data: Callable[[], Any] = Rows,
    evaluation: Callable[[], Any] | None = held_out,
    callbacks: Callable[[Path], list[Any]] = lambda folder: [],
    trainer: dict[str, Any] | None = None,
    interrupted_after: int | None = None,
    epochs: int | None = 2,
    **arguments: Any,
) -> Any:
    """All that a native run has come to. With `interrupted_after` it is resumed in a new trainer."""
    results = []
    for resume_from in (None,) if interrupted_after is None else (None, folder / "state"):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        events = Events()
        given = [events, *callbacks(folder)]
        if interrupted_after is not None and resume_from is None:
            given.append(Interrupt(folder / "state", interrupted_after))
        made = model()
        torch.manual_seed(5)
        parts = {"callbacks": given, "seed": 11, **(trainer or {})}
        trainer_ = kind(made, nn.MSELoss(), optimizer(made.parameters()), **parts)
        options = {"per_device_batch_size": 4, **arguments}
        trainer_.train(data(), epochs, evaluation and evaluation(), resume_from=resume_from, **options)
        assert trainer_.run_config.num_processes == RANKS, trainer_.run_config
        history = trainer_.run_history
        results.append(
            {
                "model": trainer_.get_model().state_dict(),
                "scale": getattr(trainer_, "scale", None),
                "optimizer": trainer_.optimizer.state_dict(),
                "scheduler": None if trainer_.scheduler is None else trainer_.scheduler.state_dict(),
                "history": {name: list(history.get_metric_values(name)) for name in history.get_metric_names()},
                "steps": [
                    record._replace(ranks=())._asdict() for record in history.step_records
                ],  # without their clocks
                "ema": [each.state_dict() for each in given if isinstance(each, ModelEmaCallback)],
                "updates": trainer_.run_state.updates,
                "events": events.seen,
            }
        )
    return results


def run_face(
    folder: Path,
    *,
    kind: type[face.Trainer] = face.Trainer,
    model: Callable[[], nn.Module] = Regression,
    data: Callable[[], Any] = rows_in_dicts,
    callbacks: Callable[[], list[Any]] = list,
    interrupted_after: int | None = None,
    parts: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    **arguments: Any,
) -> Any:
    """All that a run of the other face has come to. With `interrupted_after` it is resumed in a new trainer."""
    options = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "learning_rate": 0.1,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
    }
    results = []
    for is_resumed in (False,) if interrupted_after is None else (False, True):
        events = FaceEvents()
        given = [events, *callbacks()]
        if interrupted_after is not None and not is_resumed:
            given.append(FaceInterrupt(interrupted_after))
        made = model()
        trainer = kind(
            model=made,
            args=face.TrainingArguments(str(folder), **{**options, **arguments}),
            train_dataset=data(),
            eval_dataset=Rows(7, as_dict=True),
            callbacks=given,
            **parts(made),
        )
        assert trainer.args.world_size == RANKS, trainer.args
        trainer.remove_callback(face.PrinterCallback)
        torch.manual_seed(7)
        output = trainer.train(resume_from_checkpoint=is_resumed or None)
        results.append(
            {
                "model": trainer.model.state_dict(),
                "scale": getattr(trainer, "scale", None),
                "optimizer": trainer.optimizer.state_dict(),
                "scheduler": trainer.lr_scheduler.state_dict(),
                "history": trainer.state.log_history,
                "loss": output.training_loss,
                "predictions": trainer.predict(Rows(9, as_dict=True)).predictions,
                "events": events.seen,
            }
        )
    return results


def cosine(optimizer: Any) -> Any:
    """A schedule of torch's, longer than the run."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)


def plateau(optimizer: Any) -> Any:
    """A rate that is halved when the loss of the evaluation no longer improves."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
NOISY = functools.partial(Rows, is_augmented=True)
DROPOUT = functools.partial(network, dropout=0.4)
NOISY_DICTS = functools.partial(Rows, is_augmented=True, as_dict=True)
UPDATES = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH


def _save_every_two(folder: Path) -> list[Any]:
    return [SaveTrainingStateCallback(folder / "states", save_every_n_steps=2, max_checkpoints=2, save_at_end=False)]


NATIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"optimizer": ADAM},
    "accumulation of 3": {"gradient_accumulation_steps": 3},
    "accumulation of 3, batches of 1": {"gradient_accumulation_steps": 3, "per_device_batch_size": 1, "model": Small},
    "clipped by norm": {"gradient_clip_norm": 0.3},
    "clipped by value": {"gradient_clip_value": 0.02, "gradient_accumulation_steps": 3},
    "bf16": {"trainer": {"mixed_precision": "bf16"}},
    "bf16, accumulated, clipped, adam": {
        "trainer": {"mixed_precision": "bf16"},
        "gradient_accumulation_steps": 3,
        "gradient_clip_norm": 0.3,
        "optimizer": ADAM,
    },
    "tensors in memory": {"data": table},
    "tensors in memory, odd size": {"data": functools.partial(table, 19), "per_device_batch_size": 5},
    "numpy columns": {"data": lambda: tuple(values.numpy() for values in table())},
    "stream": {"data": Stream, "gradient_accumulation_steps": 3},
    "own loader": {"data": own_loader(shuffle=True)},
    "own loader, drop_last": {"data": own_loader(drop_last=True), "gradient_accumulation_steps": 3},
    "2 workers": {"data": NOISY, "train_dataloader_kwargs": {"num_workers": 2}},
    "2 persistent workers": {
        "data": NOISY,
        "train_dataloader_kwargs": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1},
    },
    "dicts": {
        "kind": DictTrainer,
        "data": functools.partial(Rows, as_dict=True),
        "evaluation": functools.partial(Rows, 7, as_dict=True),
    },
    "ready batches": {"data": Batches, "gradient_accumulation_steps": 2},
    "dropout and augmentation": {"data": NOISY, "model": DROPOUT, "gradient_accumulation_steps": 3},
    "seed of the process": {"data": NOISY, "model": DROPOUT, "trainer": {"seed": None}},
    "inference mode": {
        "trainer": {"inference_mode": True},
        "callbacks": lambda folder: [StepBasedEvaluationCallback(2)],
    },
    "odd size": {"data": functools.partial(Rows, 23), "gradient_accumulation_steps": 3, "per_device_batch_size": 3},
    "fewer rows than an update": {"data": functools.partial(Rows, 5), "gradient_accumulation_steps": 3},
    "drop_last": {"data": functools.partial(Rows, 23), "train_dataloader_kwargs": {"drop_last": True}},
    "schedule per update": {"create_scheduler_fn": cosine, "gradient_accumulation_steps": 3},
    "schedule per epoch": {"create_scheduler_fn": cosine, "step_scheduler": "epoch", "epochs": 3},
    "schedule that warms up": {
        "create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(
            num_warmup_epochs=1, warmup_starting_lr=0.01, num_update_steps_per_epoch=UPDATES
        ),
        "epochs": 3,
    },
    "schedule that decays": {
        "create_scheduler_fn": WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
        "epochs": 3,
    },
    "plateau": {"create_scheduler_fn": plateau, "epochs": 4},
    "interrupted": {"interrupted_after": 2, "data": NOISY, "model": DROPOUT, "create_scheduler_fn": cosine},
    "interrupted, accumulated": {
        "interrupted_after": 1,
        "data": NOISY,
        "model": DROPOUT,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAM,
    },
    "interrupted, 2 workers": {"interrupted_after": 4, "data": NOISY, "train_dataloader_kwargs": {"num_workers": 2}},
    "interrupted stream": {"interrupted_after": 2, "data": Stream, "model": DROPOUT},
    "NaN is skipped": {"kind": NaNLosses, "nonfinite_policy": "skip", "create_scheduler_fn": cosine},
    "NaN is skipped, accumulated": {"kind": NaNLosses, "nonfinite_policy": "skip", "gradient_accumulation_steps": 2},
    "NaN rolls back": {
        "kind": NaNLosses,
        "nonfinite_policy": "rollback",
        "callbacks": _save_every_two,
        "data": functools.partial(Rows, 20),
        "per_device_batch_size": 2,
    },
    "average of weights": {
        "callbacks": lambda folder: [ModelEmaCallback(decay=0.8, save_path=folder / "ema.pt")],
        "optimizer": ADAM,
    },
    "interrupted, average of weights": {
        "callbacks": lambda folder: [ModelEmaCallback(decay=0.8, save_path=folder / "ema.pt")],
        "interrupted_after": 2,
    },
    "best model": {"callbacks": lambda folder: [SaveBestModelCallback(folder / "best.pt")], "epochs": 3},
    "loss with a parameter": {"kind": LearntScale, "gradient_clip_norm": 0.3, "interrupted_after": 2},
    "items counted beforehand": {"kind": CountsItems, "gradient_accumulation_steps": 3},
    "items counted late": {"kind": CountsLate, "gradient_accumulation_steps": 3, "gradient_clip_norm": 0.3},
    "stopped by a callback": {"callbacks": lambda folder: [StopAfterEpoch()], "epochs": 3},
    "stopped early": {
        "callbacks": lambda folder: [EarlyStoppingCallback(1, early_stopping_threshold=0.5)],
        "epochs": 6,
    },
    "stopped at a value": {"callbacks": lambda folder: [StopAtCallback("train_loss_epoch", at_most=10.0)], "epochs": 3},
    "limited updates": {"max_num_train_steps": 4, "epochs": None, "create_scheduler_fn": cosine},
    "evaluated within an epoch": {"callbacks": lambda folder: [StepBasedEvaluationCallback(2)], "model": DROPOUT},
    "several evaluation sets": {"evaluation": lambda: {"a": table(7), "b": table(5)}},
    "no evaluation": {"evaluation": None},
    "overfit": {"overfit_batches": 2, "epochs": 3},
    "few records": {"record_every_n_steps": 2, "gradient_clip_norm": 0.3},
}
#: Splitting works on one process.
NATIVE_ON_ONE: dict[str, dict[str, Any]] = {}
FACE: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation of 3": {"gradient_accumulation_steps": 3},
    "not clipped": {"max_grad_norm": 0.0, "optim": "sgd"},
    "clipped, accumulated": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "stream": {"data": functools.partial(Stream, as_dict=True), "max_steps": 5},
    "2 workers": {"data": NOISY_DICTS, "dataloader_num_workers": 2},
    "dropout and augmentation": {"data": NOISY_DICTS, "model": functools.partial(Regression, dropout=0.4)},
    "odd size": {"data": functools.partial(Rows, 23, as_dict=True), "per_device_train_batch_size": 3},
    "drop_last": {"data": functools.partial(Rows, 23, as_dict=True), "dataloader_drop_last": True},
    "sequential": {"train_sampling_strategy": "sequential"},
    "cosine schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "metric_for_best_model": "eval_loss",
        "num_train_epochs": 3,
    },
    "interrupted": {
        "interrupted_after": 2,
        "data": NOISY_DICTS,
        "model": functools.partial(Regression, dropout=0.4),
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
    },
    "interrupted, own loss": {"interrupted_after": 2, "kind": OwnLoss},
    "items counted": {"model": functools.partial(Regression, is_counting=True), "gradient_accumulation_steps": 3},
    "own loss": {"kind": OwnLoss, "gradient_accumulation_steps": 3},
    "own optimizer": {"parts": lambda model: {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.05), None)}},
    "best model, stopped early": {
        "callbacks": lambda: [face.EarlyStoppingCallback(1, 0.5)],
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "num_train_epochs": 4,
    },
    "limited updates": {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2},
}


def configurations(word: str = "") -> dict[str, Callable[[Path], Any]]:
    """Runs by name, those whose name has `word`."""
    native = NATIVE | NATIVE_ON_ONE if RANKS == 1 else NATIVE
    runs: dict[str, Callable[[Path], Any]] = {
        f"native: {name}": functools.partial(run_native, **options) for name, options in native.items()
    }
    runs |= {f"huggingface: {name}": functools.partial(run_face, **options) for name, options in FACE.items()}
    return {name: run for name, run in runs.items() if word in name}


# -------------------------------------------------------------------------------------------------------- the digests


def digest(value: Any) -> str:
    """A digest that differs if any bit of `value` does. Names that depend on the clock don't count."""
    hashed = hashlib.sha256()
    _hash(value, hashed.update)
    return hashed.hexdigest()


def _hash(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu()
        update(f"tensor {array.dtype} {tuple(array.shape)}".encode())
        update(array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    elif isinstance(value, np.ndarray):
        update(f"array {value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            if not any(word in str(key) for word in CLOCK):
                update(f"key {key}".encode())
                _hash(value[key], update)
    elif isinstance(value, (list, tuple)):
        update(f"sequence of {len(value)}".encode())
        for item in value:
            _hash(item, update)
    elif not callable(value):
        update(f"{type(value).__name__} {value!r}".encode())


# -------------------------------------------------------------------------------------------------- child and parent


def run_all(output: Path, word: str) -> None:
    """The child: run all configurations on this rank and write their digests."""
    torch.set_num_threads(1)
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, run) in enumerate(configurations(word).items()):
            shared = output.parent / f"run-{number}"  # of all ranks
            os.chdir(folder)
            print(f"--- {name}", flush=True)
            try:
                digests[name] = digest(run(shared))
            except Exception as error:
                traceback.print_exc()
                digests[name] = f"failed with {type(error).__name__}: {error}"
    output.write_text(json.dumps(digests), encoding="utf-8")


def digests_of(checkout: Path, processes: int, word: str) -> dict[str, str]:
    """The digests of a checkout's runs on so many processes."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free, contextlib.ExitStack() as ends:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        common = {**os.environ, "PYTHONPATH": str(checkout / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank in range(processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            variables = {**address, "ACCELERATE_USE_CPU": "true", **{key: str(value) for key, value in place.items()}}
            log = ends.enter_context((folder / f"{rank}.log").open("wb"))
            command = [sys.executable, __file__, "--child", str(folder / f"{rank}.json"), "--only", word]
            env = {**common, **(variables if processes > 1 else {})}
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
            ends.callback(ranks[-1].kill)
        for rank, process in enumerate(ranks):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIME_LIMIT_SECONDS)
            if process.returncode != 0:
                print((folder / f"{rank}.log").read_text(encoding="utf-8")[-8000:], file=sys.stderr)
                raise SystemExit(f"{checkout}: rank {rank} of {processes} ended with {process.returncode}")
        of_ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]
    return {name: " ".join(of_rank[name] for of_rank in of_ranks) for name in of_ranks[0]}


def main() -> int:
    """Compare both checkouts and print what is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="the checkout to compare this one with")
    parser.add_argument("--processes", default="1,2", help="numbers of processes, separated by commas")
    parser.add_argument("--only", default="", metavar="WORD", help="only configurations whose name has this word")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        run_all(arguments.child, arguments.only)
        return 0
    if arguments.other is None or not (arguments.other / "src" / "pytorch_accelerated").is_dir():
        parser.error(f"there is no src/pytorch_accelerated in {arguments.other}")
    total = bad = 0
    for processes in map(int, arguments.processes.split(",")):
        ours, theirs = (digests_of(path, processes, arguments.only) for path in (ROOT, arguments.other.resolve()))
        for name in ours | theirs:
            failures = {text for text in (ours[name], theirs[name]) if "failed with" in text}
            verdict = "FAILED" if failures else "same" if ours[name] == theirs[name] else "DIFFERENT"
            total += 1
            bad += verdict != "same"
            print(f"{verdict:<10}{processes}  {name}", *failures, sep="\n    ")
    print(f"{total} configurations, {bad} different or failed")
    return 1 if bad or not total else 0


if __name__ == "__main__":
    sys.exit(main())
