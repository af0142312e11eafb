"""The Hugging Face trainer and its training, as the native parts behind them need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.engine.counting import BatchCounter
from pytorch_accelerated.huggingface.events.callbacks import CallbackHandler
from pytorch_accelerated.huggingface.events.state import TrainerControl, TrainerState


class Face(Protocol):
    """The trainer that users see: attributes that scripts may replace, and methods that they may override."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any
    processing_class: Any
    compute_loss_func: Callable[..., Any] | None
    is_in_train: bool

    @property
    def counts_items(self) -> bool:
        """Whether the loss is told the number of labels in an update."""

    def count_items(self, batch: Any) -> int | None:
        """The labels in a batch that count."""

    def get_train_dataloader(self) -> Any:
        """The loader of a training run."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what is missing of the two."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Add the gradients of one batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch."""

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Estimate the operations of a batch."""

    def store_flos(self) -> None:
        """Add the operations of the latest batches to the state."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to the log history."""


class TrainingHooks(Protocol):
    """One training of that trainer, which the engine informs of its progress."""

    counter: BatchCounter

    def plan(self, updates_per_epoch: int | None) -> int:
        """The number of updates of the run."""

    def begin(self) -> None:
        """The run begins."""

    def resume(self, folder: Path) -> None:
        """Load a checkpoint."""

    def may_log_step(self) -> bool:
        """Whether the current update may be logged."""

    def end_step(self) -> None:
        """An update is over."""

    def end_epoch(self) -> None:
        """An epoch is over."""

    def evaluate_as_requested(self) -> None:
        """Evaluate at a safe point."""

    def save_as_requested(self) -> None:
        """Save at a safe point."""

    def save_because_of_signal(self) -> None:
        """A signal has stopped the run."""

    def end(self) -> None:
        """The run is over."""
