"""Ways to train and evaluate: by hand, with accelerate by hand, and this library. peers.py has the other libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import default_collate

from benchmarks.data import Batch, ReadyBatches
from benchmarks.processes import processor_seconds_of_ended_children
from benchmarks.work import Feed, Job, Parts, inputs_and_targets


class Outcome(NamedTuple):
    """The outcome of a job. Ways are compared only if their losses are the same.

    Attributes:
        seconds: what a user waits for.
        loss: after training, or of the evaluation.
        processor_seconds: what all threads and loader processes have used.
    """

    seconds: float
    loss: float
    processor_seconds: float


class Way:
    """One way of doing a job. Its constructor imports what it needs, so that others don't pay for it.

    Args:
        is_lean: without bars, logs and checkpoints; otherwise with the library's defaults.

    Attributes:
        library: the name of the library.
        name: the name of this way in the tables.
        is_scheduled: whether it clips gradients and has a linear schedule, so that it learns something else.
    """

    library: str
    endings = (", lean", ", as it comes")
    is_scheduled = False

    def __init__(self, *, is_lean: bool = True) -> None:
        self.is_lean = is_lean
        self.name = self.library + self.endings[0 if is_lean else 1]

    def train(self, parts: Parts, feed: Feed) -> None:
        """All epochs; a dataset is shuffled unless it is a stream."""
        raise NotImplementedError

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        """The mean loss over all samples."""
        raise NotImplementedError

    def takes(self, job: Job) -> bool:
        """Whether the library can load the data of `job` without another loader."""
        return True

    def run(self, job: Job) -> Outcome:
        """Do `job`. The clock measures what a user would wait for once model and data exist."""
        parts, feed = job.parts(), job.feed()
        do: Callable[[Parts, Feed], float | None] = self.evaluate if job.is_evaluation else self.train
        gc.collect()  # no way pays for the garbage of others
        of_others = processor_seconds_of_ended_children()
        with unseen():
            start, own_start = time.perf_counter(), time.process_time()
            loss = do(parts, feed)
            seconds, own = time.perf_counter() - start, time.process_time() - own_start
        gc.collect()  # ends loader processes that are still kept by garbage
        of_children = processor_seconds_of_ended_children() - of_others
        return Outcome(seconds, job.loss_of(parts.model) if loss is None else loss, own + of_children)

    def fresh_environment(self) -> dict[str, str]:
        """Environment variables that a new process needs for this way."""
        return {}

    def close(self) -> None:
        """Release what the constructor acquired."""


def mean_loss(model: nn.Module, loss_func: nn.Module, batches: Iterable[Any]) -> float:
    """The evaluation that one would write by hand."""
    model.eval()
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        for inputs, targets in map(inputs_and_targets, batches):
            total += loss_func(model(inputs), targets) * len(targets)
            count += len(targets)
    return total.item() / count


class RawLoop(Way):
    """A hand-written loop, including the loader.

    Args:
        workers: loader processes of this loop, whatever the job says.
    """

    library = "raw loop"
    endings = ("", "")

    def __init__(self, workers: int | None = None) -> None:
        super().__init__()
        self._workers = workers
        if workers is not None:
            self.name += f", {workers} worker{'' if workers == 1 else 's'}"

    def train(self, parts: Parts, feed: Feed) -> None:
        model, loss_func, optimizer = parts
        batches = self.batches(feed, shuffle=True)
        model.train()
        for _ in range(feed.epochs):
            for inputs, targets in map(inputs_and_targets, batches):
                loss = loss_func(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        return mean_loss(parts.model, parts.loss_func, self.batches(feed, shuffle=False))

    def batches(self, feed: Feed, *, shuffle: bool) -> Iterable[Any]:
        """The batches of each pass."""
        if self._workers is not None:
            feed = dataclasses.replace(feed, workers=self._workers)
        return feed.loader(shuffle=shuffle)


class RawLoopClippedAndScheduled(RawLoop):
    """A hand-written loop that does in each update what Hugging Face's arguments ask for by default."""

    library = "raw loop, clipped and scheduled"
    is_scheduled = True

    def train(self, parts: Parts, feed: Feed) -> None:
        update: Any = _ClippedAndScheduled(parts, feed.steps)
        super().train(parts._replace(optimizer=update), feed)


class _ClippedAndScheduled:
    """The calls of an optimizer in a loop, with clipping and a schedule."""

    def __init__(self, parts: Parts, steps: int) -> None:
        self._parameters = list(parts.model.parameters())
        self._optimizer = parts.optimizer
        self._schedule = _linear_schedule(parts.optimizer, steps)
        self.zero_grad = parts.optimizer.zero_grad

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()


class RawLoopOnWholeBatches(RawLoop):
    """The lower limit: a hand-written loop with one indexing operation per batch. One pass only."""

    library = "raw loop, whole-batch indexing"

    def batches(self, feed: Feed, *, shuffle: bool) -> Iterator[Batch]:
        inputs, targets = feed.data.tensors
        order = torch.randperm(len(inputs)) if shuffle else torch.arange(len(inputs))
        return ((inputs[rows], targets[rows]) for rows in order.split(feed.batch_size))


class AccelerateByHand(Way):
    """A hand-written loop over objects prepared by accelerate."""

    library = "accelerate by hand"
    endings = ("", "")

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        from accelerate import Accelerator

        self._new_accelerator = Accelerator

    def train(self, parts: Parts, feed: Feed) -> None:
        accelerator = self._new_accelerator()
        batches = feed.loader(shuffle=True)
        model, optimizer, batches = accelerator.prepare(parts.model, parts.optimizer, batches)
        model.train()
        for _ in range(feed.epochs):
            for inputs, targets in map(inputs_and_targets, batches):
                accelerator.backward(parts.loss_func(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        accelerator = self._new_accelerator()
        batches = feed.loader(shuffle=False)
        model, batches = accelerator.prepare(parts.model, batches)
        return mean_loss(model, parts.loss_func, batches)


class Ours(Way):
    """This library.

    Attributes:
        train_kwargs: further arguments of `Trainer.train`.
    """

    library = "ours"
    endings = (", no callbacks", ", default callbacks")
    train_kwargs: dict[str, Any] = {}

    def __init__(self, *, is_lean: bool = True) -> None:
        super().__init__(is_lean=is_lean)
        from pytorch_accelerated import Trainer

        class TrainerOnColumns(Trainer):
            def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
                return super().calculate_train_batch_loss(inputs_and_targets(batch))

            def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
                return super().calculate_eval_batch_loss(inputs_and_targets(batch))

        self._new_trainer, self._new_trainer_on_columns = Trainer, TrainerOnColumns

    def train(self, parts: Parts, feed: Feed) -> None:
        self._trainer(parts, feed).train(
            feed.data,
            num_epochs=feed.epochs,
            per_device_batch_size=feed.batch_size,
            train_dataloader_kwargs=self._loader_kwargs(feed),
            collate_fn=feed.collate_fn,
            **self.train_kwargs,
        )

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        metrics = self._trainer(parts, feed).evaluate(
            feed.data,
            per_device_batch_size=feed.batch_size,
            dataloader_kwargs=self._loader_kwargs(feed),
            collate_fn=feed.collate_fn,
        )
        return float(metrics["evaluation_loss"])

    def _trainer(self, parts: Parts, feed: Feed) -> Any:
        new_trainer = self._new_trainer_on_columns if feed.is_of_columns else self._new_trainer
        return new_trainer(*parts, **({"callbacks": ()} if self.is_lean else {}))

    def _loader_kwargs(self, feed: Feed) -> dict[str, Any]:
        return {"num_workers": feed.workers} if feed.workers else {}  # without, as users leave it out


class OursClippedAndScheduled(Ours):
    """This library, doing in each update what Hugging Face's arguments ask for by default."""

    endings = (", native face, clipped and scheduled", "")
    is_scheduled = True

    def __init__(self) -> None:
        super().__init__()
        from pytorch_accelerated import TrainerPlaceholderValues

        steps = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
        self.train_kwargs = {
            "gradient_clip_norm": 1.0,
            "create_scheduler_fn": functools.partial(_linear_schedule, steps=steps),
        }


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
            self.is_scheduled = True
            self.name += ", clipped and scheduled"
        module = importlib.import_module(self.module)
        self._trainer_class: Any = module.Trainer
        self._new_arguments: Any = module.TrainingArguments
        self._folder = tempfile.TemporaryDirectory()

    def train(self, parts: Parts, feed: Feed) -> None:
        self._trainer(parts, feed).train()

    def evaluate(self, parts: Parts, feed: Feed) -> float:
        return float(self._trainer(parts, feed).evaluate()["eval_loss"])

    def close(self) -> None:
        self._folder.cleanup()

    def _trainer(self, parts: Parts, feed: Feed) -> Any:
        model, loss_func, optimizer = parts

        class TrainerWithLoss(self._trainer_class):  # type: ignore[name-defined,misc]
            def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
                features, targets = inputs_and_targets(inputs)
                outputs = model(features)
                loss = loss_func(outputs, targets)
                return (loss, {"logits": outputs}) if return_outputs else loss

            def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                return self.compute_loss(model, inputs).detach(), None, None

        class TrainerOnReadyBatches(TrainerWithLoss):
            def get_train_dataloader(self) -> Any:
                return feed.data

            def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
                return feed.data

        workers = feed.workers or 0
        lean = {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "logging_nan_inf_filter": False}
        arguments = self._new_arguments(
            self._folder.name,
            num_train_epochs=feed.epochs,
            max_steps=feed.steps if feed.is_stream else -1,
            per_device_train_batch_size=feed.batch_size,
            per_device_eval_batch_size=feed.batch_size,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            remove_unused_columns=False,
            prediction_loss_only=True,
            report_to="none",
            use_cpu=True,
            **self._update,
            **(lean if self.is_lean else {}),
        )
        trainer_class = TrainerOnReadyBatches if isinstance(feed.data, ReadyBatches) else TrainerWithLoss
        # Without a function of the user, dicts are left to the trainer's own; it has none for rows that are tuples.
        collate_fn = feed.collate_fn or (None if feed.is_of_columns else default_collate)
        return trainer_class(
            model,
            arguments,
            data_collator=collate_fn,
            train_dataset=feed.data,
            eval_dataset=feed.data,
            optimizers=(optimizer, None),
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
