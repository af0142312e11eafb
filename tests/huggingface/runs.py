"""Tiny models, rows and runs for the Hugging Face trainer."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset[Any]):
    """Rows for a regression, the same at every call: ``x`` with two numbers and ``labels`` with one."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 2, generator=generator)
        self.labels = torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class NoisyRows(Rows):
    """The same with noise of all three generators that user code draws from."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + 0.1 * (torch.rand(2) + np.random.rand() + random.random())}


class Stream(IterableDataset[Any]):
    """The same rows without a length."""

    def __init__(self, size: int) -> None:
        self.rows = Rows(size)

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(len(self.rows)))


class Regression(nn.Module):
    """A linear model that returns loss and outputs, as a tuple or a dict."""

    def __init__(self, returns_dict: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)
        self.dropout = nn.Dropout(dropout)
        self.returns_dict = returns_dict

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.linear(self.dropout(x))
        loss = None if labels is None else ((outputs - labels) ** 2).mean()
        if self.returns_dict:
            return {"loss": loss, "logits": outputs}
        return (outputs,) if loss is None else (loss, outputs)


class AnyKeyword(Regression):
    """As many models of `transformers`: takes any keyword, ``num_items_in_batch`` too, and its loss is a mean."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(x, labels)


class Tokens(Regression):
    """Divides by the number of labels in the update, if it is told, and counts rows whose label is -100 nowhere."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.linear(x)
        if labels is None:
            return (outputs,)
        counts = labels != -100
        errors = ((outputs - labels) ** 2)[counts]
        return errors.sum() / kwargs.get("num_items_in_batch", counts.sum()), outputs


class Lengths(nn.Module):
    """Outputs as long as the longest row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": (x * self.weight - labels).abs().mean(), "logits": x * self.weight, "ids": labels.long()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator of rows of any length."""
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=-100)
        for name in rows[0]
    }


class OwnParts(Trainer):
    """A trainer whose loss has a parameter of its own, and which learns from a slow copy of its model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.zeros(()))
        self.parts = {"slow": Regression()}

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args)
        optimizer.add_param_group({"params": [self.scale], "weight_decay": 0.0})
        return optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        hints = self.parts["slow"](inputs["x"])[0]
        loss = (loss + (outputs[1] - hints).square().mean()) * torch.exp(-self.scale) + self.scale
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.enable_grad():
            loss = super().training_step(*args, **kwargs)
        for slow, fast in zip(self.parts["slow"].parameters(), self.model.parameters(), strict=True):
            slow.lerp_(fast, 0.3)
        return loss

    def own_values(self) -> dict[str, Any]:
        """What it holds, and what it has learnt."""
        state = {"model": self.model.state_dict(), "slow": self.parts["slow"].state_dict()}
        return {**state, "optimizer": self.optimizer.state_dict(), "scale": self.scale.detach()}


class Recorder(TrainerCallback):
    """Notes the events, each with the step, and the flags that are set when it comes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def events(self) -> list[str]:
        """Their names alone."""
        return [call.split("@")[0] for call in self.calls]


def _event(name: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        flags = [flag for flag, is_set in sorted(vars(control).items()) if is_set]
        self.calls.append(f"{name.removeprefix('on_')}@{state.global_step} {' '.join(flags)}".strip())

    return method


for _name in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Recorder, _name, _event(_name))


class StopAt(TrainerCallback):
    """Saves at a step and ends the run there, as a kill after the save would."""

    def __init__(self, step: int, *, saves: bool = True) -> None:
        self.step, self.saves = step, saves

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save |= self.saves
            control.should_training_stop = True


def make_arguments(folder: Path, **arguments: Any) -> TrainingArguments:
    """Arguments of a quiet run on the CPU: batches of 2, in the order of the rows, each step logged, nothing saved."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "learning_rate": 0.1,
        "num_train_epochs": 2,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **arguments})


def make_trainer(
    folder: Path,
    *callbacks: Any,
    kind: type[Trainer] = Trainer,
    parts: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """A trainer of a `Regression` on ten `Rows`, evaluated on five; `parts` are its own, `arguments` the others."""
    given: dict[str, Any] = {"train_dataset": Rows(10), "eval_dataset": Rows(5), **(parts or {})}
    if "model_init" not in given:
        given.setdefault("model", Regression())
    trainer = kind(args=make_arguments(folder, **arguments), callbacks=list(callbacks), **given)
    trainer.callback_handler.callbacks.pop()  # which prints the logs
    return trainer


def noisy_trainer(folder: Path, *callbacks: Any, parts: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    """A trainer on noisy rows in random order, with dropout, accumulation, and evaluations of every second update."""
    return make_trainer(
        folder,
        *callbacks,
        parts={"train_dataset": NoisyRows(11), "model": Regression(dropout=0.4), **(parts or {})},
        **{
            "train_sampling_strategy": "random",
            "gradient_accumulation_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            **arguments,
        },
    )


def losses(trainer: Trainer) -> list[float]:
    """What was logged as the loss of the steps."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def without_speed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log history without what depends on the clock."""
    words = ("_runtime", "_per_second", "_preparation_time")
    return [{name: value for name, value in entry.items() if not name.endswith(words)} for entry in history]


def without_native_parts(folder: Path) -> Path:
    """What transformers would have written of a checkpoint."""
    names = ("model.safetensors", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "trainer_state.json")
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return folder


def everything(trainer: Trainer) -> dict[str, Any]:
    """What must be the same in the end, to the bit."""
    state = {name: value for name, value in vars(trainer.state).items() if name != "best_model_checkpoint"}
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "state": {**state, "log_history": without_speed(trainer.state.log_history[:-1])},
        "torch": torch.default_generator.get_state(),
        "numpy": torch.from_numpy(np.random.get_state(legacy=False)["state"]["key"].astype(np.int64)),
        "random": random.getstate(),
    }
