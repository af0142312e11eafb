"""Loops that train a workload on a GPU, each with a clock between two of its steps."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.work import Stopwatch, Workload
from benchmarks.ways import unseen
from pytorch_accelerated import Trainer

COMPILING: dict[str, Any] = {"eager": False, "compiled": True, "graphs": {"mode": "reduce-overhead"}}
Train = Callable[[Workload, str, torch.device, Stopwatch], nn.Module]


def train_raw(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """The hand-written loop."""
    model, loss_func, optimizer = workload.parts(device)
    model.train()

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=workload.autocast):
            outputs = model(inputs)
        loss_func(outputs, targets).backward()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        compute(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()

    if compiling := COMPILING[mode]:
        model.compile(**({} if compiling is True else compiling))
    for number, (inputs, targets) in enumerate(workload.batches(device), start=1):
        step(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        stopwatch.after_step(number)
    return model


def train_ours(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """The same with a trainer of this library."""
    trainer = Trainer(
        *workload.parts(device),
        callbacks=[stopwatch],
        mixed_precision="bf16" if workload.autocast else "no",
        compile_model=COMPILING[mode],
    )
    with unseen():
        trainer.train(workload.batches(device), num_epochs=1)
    return trainer.get_model()


def train_with_accelerate(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """A hand-written loop over objects that accelerate prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if workload.autocast else "no")
    bare, loss_func, optimizer = workload.parts(device)
    model, optimizer = accelerator.prepare(bare, optimizer)
    model.train()
    for number, (inputs, targets) in enumerate(workload.batches(device), start=1):
        outputs = model(inputs.to(device, non_blocking=True))
        accelerator.backward(loss_func(outputs, targets.to(device, non_blocking=True)))
        optimizer.step()
        optimizer.zero_grad()
        stopwatch.after_step(number)
    return bare


def train_with_transformers(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """transformers' Trainer, without logs, checkpoints, bar, clipping and schedule."""
    import transformers

    return _train_in_the_shape_of(transformers, transformers.TrainerCallback, workload, device, stopwatch)


def train_with_our_face(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """The same with this library's Hugging Face API."""
    from pytorch_accelerated import huggingface

    return _train_in_the_shape_of(huggingface, huggingface.TrainerCallback, workload, device, stopwatch)


def _train_in_the_shape_of(
    library: Any, callback_class: Any, workload: Workload, device: torch.device, stopwatch: Stopwatch
) -> nn.Module:
    model, loss_func, optimizer = workload.parts(device)

    class OnGivenBatches(library.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return workload.batches(device)

        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            features, targets = (each.to(device, non_blocking=True) for each in inputs)
            return loss_func(model(features), targets)

    class Clock(callback_class):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stopwatch.after_step(state.global_step)

    with tempfile.TemporaryDirectory() as folder, unseen():
        arguments = library.TrainingArguments(
            folder,
            num_train_epochs=1,
            max_grad_norm=0,
            lr_scheduler_type="constant",
            bf16=workload.autocast,
            logging_strategy="no",
            save_strategy="no",
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            report_to="none",
            use_cpu=device.type == "cpu",
        )
        OnGivenBatches(model, arguments, train_dataset=[{}], callbacks=[Clock()], optimizers=(optimizer, None)).train()
    return model


def train_with_lightning(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """Lightning, without logger, checkpoints, bar and summary."""
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model, loss_func, optimizer = workload.parts(device)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_index: int) -> Any:
            inputs, targets = batch
            return loss_func(self.model(inputs), targets)

        def configure_optimizers(self) -> Any:
            return optimizer

    class Clock(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            stopwatch.after_step(trainer.global_step)

    extras = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with unseen():
        lightning.Trainer(
            max_epochs=1,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if workload.autocast else None,
            callbacks=[Clock()],
            **dict.fromkeys(extras, False),
        ).fit(Module(), workload.batches(device))
    return model


OURS = "pytorch_accelerated"
WAYS: dict[str, Train] = {"raw loop": train_raw, OURS: train_ours}
PEERS: dict[str, Train] = {
    "accelerate by hand": train_with_accelerate,
    "pytorch_accelerated.huggingface": train_with_our_face,
    "Lightning": train_with_lightning,
    "transformers": train_with_transformers,
}
