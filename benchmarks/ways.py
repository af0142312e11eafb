"""Ways to train and evaluate: by hand, with accelerate by hand, and this library. peers.py has the other libraries."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.work import Batch, Job, Parts, as_loader


class Outcome(NamedTuple):
    """The outcome of a job. Ways are compared only if their losses are the same."""

    seconds: float
    loss: float


class Way:
    """One way of doing a job. Its constructor imports what it needs, so that others don't pay for it.

    Args:
        is_lean: without bars, logs and checkpoints; otherwise with the library's defaults.

    Attributes:
        library: the name of the library.
        name: the name of this way in the tables.
    """

    library: str
    endings = (", lean", ", as it comes")

    def __init__(self, *, is_lean: bool = True) -> None:
        self.is_lean = is_lean
        self.name = self.library + self.endings[0 if is_lean else 1]

    def train(self, parts: Parts, data: Any, batch_size: int) -> None:
        """One epoch; a dataset is shuffled."""
        raise NotImplementedError

    def evaluate(self, parts: Parts, data: Any, batch_size: int) -> float:
        """The mean loss over all samples."""
        raise NotImplementedError

    def run(self, job: Job) -> Outcome:
        """Do `job`. The clock measures what a user would wait for once model and data exist."""
        parts, data = job.parts(), job.data()
        gc.collect()  # no way pays for the garbage of others
        with unseen():
            start = time.perf_counter()
            loss = (self.evaluate if job.is_evaluation else self.train)(parts, data, job.batch_size)
            seconds = time.perf_counter() - start
        return Outcome(seconds, job.loss_of(parts.model) if loss is None else loss)

    def fresh_environment(self) -> dict[str, str]:
        """Environment variables that a new process needs for this way."""
        return {}

    def close(self) -> None:
        """Release what the constructor acquired."""


def mean_loss(model: nn.Module, loss_func: nn.Module, batches: Iterable[Batch]) -> float:
    """The evaluation that one would write by hand."""
    model.eval()
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        for inputs, targets in batches:
            total += loss_func(model(inputs), targets) * len(targets)
            count += len(targets)
    return total.item() / count


class RawLoop(Way):
    """A hand-written loop, including the loader."""

    library = "raw loop"
    endings = ("", "")
    loader_kwargs: dict[str, Any] = {}

    def train(self, parts: Parts, data: Any, batch_size: int) -> None:
        model, loss_func, optimizer = parts
        model.train()
        for inputs, targets in self.batches(data, batch_size, shuffle=True):
            loss = loss_func(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self, parts: Parts, data: Any, batch_size: int) -> float:
        return mean_loss(parts.model, parts.loss_func, self.batches(data, batch_size, shuffle=False))

    def batches(self, data: Any, batch_size: int, *, shuffle: bool) -> Iterable[Batch]:
        return as_loader(data, batch_size, shuffle=shuffle, **self.loader_kwargs)


class RawLoopWithWorker(RawLoop):
    """A hand-written loop with another process that loads."""

    library = "raw loop, 1 worker"
    loader_kwargs = {"num_workers": 1}


class RawLoopOnWholeBatches(RawLoop):
    """The lower limit: a hand-written loop with one indexing operation per batch."""

    library = "raw loop, whole-batch indexing"

    def batches(self, data: Any, batch_size: int, *, shuffle: bool) -> Iterator[Batch]:
        inputs, targets = data.tensors
        order = torch.randperm(len(data)) if shuffle else torch.arange(len(data))
        return ((inputs[rows], targets[rows]) for rows in order.split(batch_size))


class AccelerateByHand(Way):
    """A hand-written loop over objects prepared by accelerate."""

    library = "accelerate by hand"
    endings = ("", "")

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        from accelerate import Accelerator

        self._new_accelerator = Accelerator

    def train(self, parts: Parts, data: Any, batch_size: int) -> None:
        accelerator = self._new_accelerator()
        batches = as_loader(data, batch_size, shuffle=True)
        model, optimizer, batches = accelerator.prepare(parts.model, parts.optimizer, batches)
        model.train()
        for inputs, targets in batches:
            accelerator.backward(parts.loss_func(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self, parts: Parts, data: Any, batch_size: int) -> float:
        accelerator = self._new_accelerator()
        batches = as_loader(data, batch_size, shuffle=False)
        model, batches = accelerator.prepare(parts.model, batches)
        return mean_loss(model, parts.loss_func, batches)


class Ours(Way):
    """This library."""

    library = "ours"
    endings = (", no callbacks", ", default callbacks")

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        from pytorch_accelerated import Trainer

        self._new_trainer = Trainer

    def train(self, parts: Parts, data: Any, batch_size: int) -> None:
        self._trainer(parts).train(data, num_epochs=1, per_device_batch_size=batch_size)

    def evaluate(self, parts: Parts, data: Any, batch_size: int) -> float:
        metrics = self._trainer(parts).evaluate(data, per_device_batch_size=batch_size)
        return float(metrics["evaluation_loss"])

    def _trainer(self, parts: Parts) -> Any:
        return self._new_trainer(*parts, **({"callbacks": ()} if self.is_lean else {}))


class OursClippedAndScheduled(Ours):
    """This library, doing in each update what Hugging Face's arguments ask for by default."""

    endings = (", native face, clipped and scheduled", "")

    def train(self, parts: Parts, data: Any, batch_size: int) -> None:
        from pytorch_accelerated import TrainerPlaceholderValues

        self._trainer(parts).train(
            data,
            num_epochs=1,
            per_device_batch_size=batch_size,
            gradient_clip_norm=1.0,
            create_scheduler_fn=functools.partial(
                _linear_schedule, steps=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
            ),
        )


def _linear_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))


class HuggingFaceShape(Way):
    """A trainer with Hugging Face's API.

    Lean: no logs, checkpoints, bar and NaN filter. Clipping and the decay of the learning rate are off unless
    requested.

    Args:
        is_lean: see above.
        clips_and_schedules: whether these two have the arguments' defaults.

    Attributes:
        module: has `Trainer` and `TrainingArguments`.
    """

    module: str

    def __init__(self, *, is_lean: bool = True, clips_and_schedules: bool = False) -> None:
        super().__init__(is_lean=is_lean)
        self._update: dict[str, Any] = {"lr_scheduler_type": "constant", "max_grad_norm": 0}
        if clips_and_schedules:
            self._update = {}
            self.name += ", clipped and scheduled"
        module = importlib.import_module(self.module)
        self._trainer_class: Any = module.Trainer
        self._new_arguments: Any = module.TrainingArguments
        self._folder = tempfile.TemporaryDirectory()

    def train(self, parts: Parts, data: Any, batch_size: int) -> None:
        self._trainer(parts, as_loader(data, batch_size, shuffle=True)).train()

    def evaluate(self, parts: Parts, data: Any, batch_size: int) -> float:
        metrics = self._trainer(parts, as_loader(data, batch_size, shuffle=False)).evaluate()
        return float(metrics["eval_loss"])

    def close(self) -> None:
        self._folder.cleanup()

    def _trainer(self, parts: Parts, loader: Any) -> Any:
        model, loss_func, optimizer = parts

        class TrainerOnLoader(self._trainer_class):  # type: ignore[name-defined,misc]
            def get_train_dataloader(self) -> Any:
                return loader

            def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
                return loader

            def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
                outputs = model(inputs[0])
                loss = loss_func(outputs, inputs[1])
                return (loss, {"logits": outputs}) if return_outputs else loss

            def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                return self.compute_loss(model, inputs).detach(), None, None

        lean = {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "logging_nan_inf_filter": False}
        arguments = self._new_arguments(
            self._folder.name,
            num_train_epochs=1,
            per_device_eval_batch_size=getattr(loader, "batch_size", 8),
            prediction_loss_only=True,
            report_to="none",
            use_cpu=True,
            **self._update,
            **(lean if self.is_lean else {}),
        )
        return TrainerOnLoader(
            model, arguments, train_dataset=loader, eval_dataset=loader, optimizers=(optimizer, None)
        )


class OursInHuggingFaceShape(HuggingFaceShape):
    """This library, with its Hugging Face API."""

    library = "ours, Hugging Face face"
    module = "pytorch_accelerated.huggingface"


OURS = ("ours, no callbacks", "ours, default callbacks")


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Discard output, in a stream that claims to be a terminal, so that bars are drawn."""
    output = _UnseenTerminal()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _UnseenTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True
