"""The callbacks of the library, and the names that scripts import from here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.progress import saved_line, speed_in_words
from pytorch_accelerated.errors import CallbackSetupError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.trees import length_of
from pytorch_accelerated.huggingface.arguments.argument import TRACKERS
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy
from pytorch_accelerated.huggingface.events import CallbackHandler as CallbackHandler
from pytorch_accelerated.huggingface.events import DefaultFlowCallback as DefaultFlowCallback
from pytorch_accelerated.huggingface.events import ExportableState as ExportableState
from pytorch_accelerated.huggingface.events import TrainerCallback as TrainerCallback
from pytorch_accelerated.huggingface.events import TrainerControl as TrainerControl
from pytorch_accelerated.huggingface.events import TrainerState as TrainerState
from pytorch_accelerated.huggingface.trainer_utils import checkpoint_name, output_dir_of
from pytorch_accelerated.record.bars import LineDisplay, Progress, new_display, new_page
from pytorch_accelerated.record.history import LoggedHistory, is_about_the_run, is_summary
from pytorch_accelerated.record.text import (
    GrowingTable,
    block,
    folded,
    format_count,
    format_duration,
    format_number,
    screen_columns,
    show,
)
from pytorch_accelerated.record.watching import best_facts, with_mark

if TYPE_CHECKING:
    from pytorch_accelerated.extras.huggingface.trackers import ReportingCallback as ReportingCallback
    from pytorch_accelerated.extras.huggingface.trackers import TensorBoardCallback as TensorBoardCallback


class PrinterCallback(TrainerCallback):
    """Prints the logs, once on each machine, if there are no progress bars."""

    ranks_agree_after_each_update = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Print the logs as a dict, without the number of operations."""
        if state.is_local_process_zero and logs:
            show({name: value for name, value in logs.items() if name != "total_flos"})


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Ends the run when ``metric_for_best_model`` has stopped improving.

    Every evaluation during training is compared with the best one before it. An evaluation without the metric, of
    another of several datasets, is ignored.

    Args:
        early_stopping_patience: the run ends after this many evaluations in a row without an improvement.
        early_stopping_threshold: an improvement is a change by more than this, in units of the metric.

    Attributes:
        early_stopping_patience_counter: evaluations in a row without an improvement, so far.
        reason_to_stop: why the callback ended the current training, or "".

    Raises:
        CallbackSetupError: if the patience is less than 1, or the threshold negative. When a training begins, if the
            arguments have no ``metric_for_best_model`` or no evaluations.
    """

    ranks_agree_after_each_update = False

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        threshold = early_stopping_threshold or 0.0
        if not (early_stopping_patience >= 1 and threshold >= 0):
            raise CallbackSetupError(
                f"EarlyStoppingCallback has a patience of {early_stopping_patience!r} and a threshold of "
                f"{early_stopping_threshold!r}: give a patience of 1 or more, and a threshold from 0 on."
            )
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = threshold
        self.early_stopping_patience_counter = 0
        self.reason_to_stop = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Check that there will be evaluations with a metric."""
        self.reason_to_stop = ""
        if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO:
            raise CallbackSetupError(
                "EarlyStoppingCallback compares evaluations by a metric, but `metric_for_best_model` is "
                f"{args.metric_for_best_model!r} and `eval_strategy` is {str(args.eval_strategy)!r}. Give both."
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> Any:
        """Compare an evaluation with the best one."""
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (metrics or {}).get(name)
        if value is None:
            return
        if state.best_metric is None:
            # The first value counts as an improvement, even NaN, but a second NaN does not.
            is_better = not math.isnan(value) or sum(name in entry for entry in state.log_history) < 2
        else:
            gain = value - state.best_metric
            is_better = (gain if args.greater_is_better else -gain) > self.early_stopping_threshold
        self.early_stopping_patience_counter = 0 if is_better else self.early_stopping_patience_counter + 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True
            more = f" by more than {self.early_stopping_threshold:g}" if self.early_stopping_threshold else ""
            evaluations = format_count(self.early_stopping_patience_counter, "evaluation")
            self.reason_to_stop = f"{name} had no improvement{more} in {evaluations}"

    def state(self) -> dict[str, Any]:
        """Patience, threshold and counter."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }


DEFAULT_CALLBACKS: list[type] = [DefaultFlowCallback]


MINOR_COLUMNS = ("grad_norm", "lr", "elapsed")
_SHORT_NAMES = {"learning_rate": "lr"}


def format_epochs(epochs: float) -> str:
    """A number of epochs, without decimals if it is whole.

    >>> format_epochs(2.0), format_epochs(0.5)
    ('2', '0.50')
    """
    text = f"{epochs:.2f}"
    return text.removesuffix(".00")


def _text(value: Any, name: str = "") -> str:
    if name == "learning_rate" and isinstance(value, float):
        return f"{value:.2e}"
    return format_number(value) if isinstance(value, float) else str(value)


class ProgressCallback(TrainerCallback):
    """Shows the progress of training, evaluations and predictions, and the logs, once on each machine.

    Terminals have a bar, other outputs an occasional line. The logs of a training are a table with a row for each step
    that has any; a "*" marks a new best value of ``metric_for_best_model``, else of the loss of evaluations. A summary
    follows. In a notebook, a training has one display: bars and the table.
    """

    ranks_agree_after_each_update = False

    def __init__(self) -> None:
        self._lines = LineDisplay(show)
        self._bars: dict[str, Progress] = {}
        self._history: LoggedHistory | None = None  # while a training runs, where it is shown
        self._table, self._row = GrowingTable(MINOR_COLUMNS), {}  # type: ignore[var-annotated]
        self._page: Any = None
        self._started, self._first_step = 0.0, 0
        self._saved: Path | None = None
        self._reason, self._skipped = "", 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Start the bar of the updates, and a table."""
        self.close()
        self._lines = LineDisplay(show)
        if not state.is_local_process_zero:
            return
        self._started, self._saved, self._reason, self._skipped = time.perf_counter(), None, "", 0
        self._first_step = state.global_step
        self._history, self._table, self._row = LoggedHistory(state.log_history), GrowingTable(MINOR_COLUMNS), {}
        self._page, self._watched = new_page(MINOR_COLUMNS), _watched(args)
        options = {"done": state.global_step, "unit": "steps", "read_facts": lambda: _facts(state)}
        self._begin("training", state.max_steps, **options)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Print the row of the epoch before."""
        self._print_row()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Count an update, and print the row of an earlier one."""
        if "training" in self._bars:
            self._bars["training"].advance()
            self._print_row()

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> Any:
        """Count a batch, the first one of an evaluation or prediction included."""
        if state.is_local_process_zero:
            if "evaluation" not in self._bars:
                self._begin("evaluation", length_of(eval_dataloader))
            self._bars["evaluation"].advance()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> Any:
        """Remove the bar of the evaluation or prediction."""
        self._close_bars("evaluation")

    on_predict = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Add the logs to the row of their step; print those outside of a training. Leaves out places and speeds."""
        if not state.is_local_process_zero or not logs:
            return
        if self._history is None:
            cells = {name: _text(value) for name, value in logs.items() if name != "total_flos"}
            show("\n".join(block(cells, columns=screen_columns())))
        elif not is_summary(logs) and not all(map(is_about_the_run, logs)):
            place = {"epoch": format_epochs(state.epoch), "step": str(state.global_step)}
            cells = {
                _SHORT_NAMES.get(name, name): _text(logs[name], name) for name in logs if not is_about_the_run(name)
            }
            # The metrics of an evaluation are in the row of its step.
            if not place.items() <= self._row.items() or cells.keys() & self._row.keys():
                self._print_row()
            elapsed = {"elapsed": format_duration(time.perf_counter() - self._started)}
            self._row = {**(self._row or place), **cells, **elapsed}
            self._history.add(logs, state.epoch, state.global_step)
            if self._page is not None:
                self._page.show_losses(self._history.get_metric_values("loss"))
            # An evaluation may follow, also at the end of the epoch, or another one of several sets.
            if not (control.should_evaluate or float(state.epoch).is_integer() or "loss" not in logs):
                self._print_row()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Note the checkpoint."""
        self._saved = output_dir_of(args) / checkpoint_name(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Remove all bars, and sum the run up: how it ended, its best value and its speed, what it saved where."""
        history = self._history
        self._finish()
        if history is None:
            return
        word = "Finished" if state.global_step >= state.max_steps else "Stopped early after"
        epochs = format_epochs(state.epoch)
        done = f"{epochs} {'epoch' if epochs == '1' else 'epochs'}, {format_count(state.global_step, 'step')}"
        done += f" ({self._skipped} skipped)" if self._skipped else ""
        done += f", the last {state.global_step - self._first_step}" if self._first_step else ""
        duration = format_duration(time.perf_counter() - self._started)
        reason = f": {self._reason}" if self._reason else ""
        facts = best_facts(history, self._watched, names_step=True)
        speed = dict(*state.log_history[-1:]).get("train_samples_per_second")
        facts += [] if speed is None else [speed_in_words(speed)]
        left_out = sum(int(entry.get("non_finite_losses", 0)) for entry in state.log_history)
        facts += [f"{format_count(left_out, 'loss', 'losses')} left out as not finite"] if left_out else []
        saved = {} if self._saved is None else {str(self._saved): "last checkpoint"}
        if state.best_model_checkpoint is not None:
            saved = {**saved, str(state.best_model_checkpoint): "best model"}
        places = saved_line({path: what for path, what in saved.items() if Path(path).is_dir()})
        lines = (f"{word} {done} in {duration}{reason}", ", ".join(facts), places)
        show("\n".join(folded(line) for line in lines if line))

    def note_end(self, reason: str, skipped_updates: int) -> None:
        """Note how the run ended, for the summary."""
        self._reason, self._skipped = reason, skipped_updates
        if self._page is not None and reason:
            self._page.note_end(f"Stopped early: {reason}")

    def close(self) -> None:
        """Remove all bars, and print what has been logged, also after an exception, which has no event."""
        if self._page is not None:
            self._page.note_end("Ended by an error or an interrupt")
        self._finish()

    def _finish(self) -> None:
        self._close_bars("evaluation", "training")
        self._print_row()
        self._history = None
        if self._page is not None:
            self._page.close()
            self._page = None

    def _print_row(self) -> None:
        """Print the row that has begun, if there is one. A "*" follows a new best value."""
        if self._row and self._history is not None:
            row, self._row = with_mark(self._row, self._history, self._watched), {}
            if self._page is not None:
                self._page.add_row(row)
            else:
                show(self._table.add_row(row))

    def _close_bars(self, *labels: str) -> None:
        for label in labels:
            if label in self._bars:
                self._bars.pop(label).close()

    def _begin(self, label: str, total: int | None, **options: Any) -> None:
        display = new_display(self._lines) if self._page is None else self._page.new_bar()
        self._bars[label] = Progress(label, total, display, **options)


def _watched(args: Any) -> dict[str, bool]:
    """The metric of the arguments that says which model is the best."""
    name = args.metric_for_best_model
    if name is None or args.greater_is_better is None:
        return {}
    return {name if name.startswith("eval_") else f"eval_{name}": args.greater_is_better}


def _facts(state: Any) -> dict[str, str]:
    """The epoch, and the loss that was logged last."""
    loss = next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None)
    facts = {"epoch": f"{state.epoch:.2f}"}
    return facts if loss is None else {**facts, "loss": _text(loss)}


def reporting_callbacks(report_to: Sequence[str]) -> list[Any]:
    """The callbacks, or their classes, for ``report_to`` of the arguments.

    Raises:
        MissingDependencyError: if the package of a tracker is not installed, or `transformers` for one that only it has
            a callback for.
    """
    callbacks: list[Any] = [_trackers().TensorBoardCallback] if "tensorboard" in report_to else []
    if together := [name for name in report_to if name in TRACKERS and name != "tensorboard"]:
        callbacks.append(_trackers().ReportingCallback(together))
    for name in report_to:
        if name not in TRACKERS:
            integrations = require("transformers.integrations", needed_by=f"report_to={name!r}")
            callbacks += integrations.get_reporting_integration_callbacks([name])
    return callbacks


def _trackers() -> Any:
    return require("pytorch_accelerated.extras.huggingface.trackers", needed_by="`report_to`")


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The callbacks that report to trackers, which other runs don't load."""
        if name in ("ReportingCallback", "TensorBoardCallback", "tag_of"):
            return getattr(_trackers(), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
