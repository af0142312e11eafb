"""Progress bars of a run, with a table of its logs above them, and a summary at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytorch_accelerated.huggingface.checkpoints.folders import checkpoint_name
from pytorch_accelerated.huggingface.events.callbacks import RunEnd, TrainerCallback
from pytorch_accelerated.huggingface.events.logged import LogTable
from pytorch_accelerated.progress.display import Display, above_bars, display_factory
from pytorch_accelerated.progress.formats import format_number
from pytorch_accelerated.progress.notebook import NotebookPage, can_display
from pytorch_accelerated.progress.progress import Progress, length_of
from pytorch_accelerated.progress.table import block, screen_columns
from pytorch_accelerated.tracking.logged import is_about_the_run, is_summary


class ProgressCallback(TrainerCallback):
    """Shows the progress of training, evaluations and predictions, and the logs, once on each machine.

    Terminals have a bar, other outputs an occasional line. The logs of a training are a table with a row for each step
    that has any; a "*" marks a new best value of ``metric_for_best_model``, else of the loss of evaluations. A summary
    follows. In a notebook, a training has one display: bars, a table and the curves of the losses.
    """

    ranks_agree_after_each_update = False

    def __init__(self) -> None:
        self._new_display: Callable[[], Display] | None = None
        self._training: Progress | None = None
        self._evaluation: Progress | None = None
        self._table: LogTable | None = None  # while a training runs, where it is shown
        self._page: NotebookPage | None = None
        self._started = 0.0
        self._speed: float | None = None
        self._saved: Path | None = None
        self._end = RunEnd()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Start the bar of the updates, and a table."""
        self.close()
        self._new_display = None  # the output may have been redirected
        if not state.is_local_process_zero:
            return
        self._started, self._speed, self._saved, self._end = time.perf_counter(), None, None, RunEnd()
        self._table = LogTable(_watched(args), state.log_history)
        if can_display():
            self._page = NotebookPage(self._table.history, self._table.watched)
        options = {"done": state.global_step, "unit": "steps", "read_facts": lambda: _facts(state)}
        self._training = self._begin(state, "training", state.max_steps, **options)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Print the row of the epoch before."""
        self._print_row()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Count an update, and print the row of an earlier one."""
        if self._training is not None:
            self._training.advance()
            if self._table is not None and self._table.has_row:
                self._print_row()

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> Any:
        """Count a batch, the first one of an evaluation or prediction included."""
        if self._evaluation is None:
            self._evaluation = self._begin(state, "evaluation", length_of(eval_dataloader))
        if self._evaluation is not None:
            self._evaluation.advance()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Remove the bar of the evaluation."""
        self._close_evaluation()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:
        """Remove the bar of the prediction."""
        self._close_evaluation()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Add the logs to the row of their step; print those outside of a training. Leaves out places and speeds."""
        if not state.is_local_process_zero or not logs:
            return
        if self._table is None:
            cells = {name: _text(value) for name, value in logs.items() if name != "total_flos"}
            _print("\n".join(block(cells, columns=screen_columns())))
        elif is_summary(logs):
            self._speed = logs.get("train_samples_per_second")
        elif any(not is_about_the_run(name) for name in logs):
            seconds = time.perf_counter() - self._started
            self._show(self._table.add(logs, state.epoch, state.global_step, seconds))
            # An evaluation may follow, also at the end of the epoch, or another one of several sets.
            if not (control.should_evaluate or float(state.epoch).is_integer() or "loss" not in logs):
                self._print_row()
            if self._page is not None:
                self._page.draw_if_due()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Note the checkpoint."""
        self._saved = Path(str(args.output_dir)) / checkpoint_name(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Remove all bars, and sum the run up."""
        table = self._table
        self._finish()
        if table is not None:
            saved = {} if self._saved is None else {str(self._saved): "last checkpoint"}
            if state.best_model_checkpoint is not None:
                saved = {**saved, str(state.best_model_checkpoint): "best model"}
            seconds = time.perf_counter() - self._started
            existing = {path: what for path, what in saved.items() if Path(path).is_dir()}
            _print("\n".join(table.closing_lines(state, seconds, self._speed, existing, self._end)))

    def note_end(self, end: RunEnd) -> None:
        """Note how the run ended, for the summary."""
        self._end = end
        if self._page is not None and end.reason:
            self._page.note_end(f"Stopped early: {end.reason}")

    def close(self) -> None:
        """Remove all bars, and print what has been logged, also after an exception, for which there is no event."""
        if self._page is not None:
            self._page.note_end("Ended by an error or an interrupt")
        self._finish()

    def _finish(self) -> None:
        self._close_evaluation()
        if self._training is not None:
            self._training.close()
            self._training = None
        self._print_row()
        self._table = None
        if self._page is not None:
            self._page.close()
            self._page = None

    def _print_row(self) -> None:
        if self._table is not None:
            self._show(self._table.take_row())

    def _show(self, rows: list[str]) -> None:
        for row in rows if self._page is None else ():  # else the page has them
            _print(row)

    def _close_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def _begin(self, state: Any, label: str, total: int | None, **options: Any) -> Progress | None:
        if not state.is_local_process_zero:
            return None
        if self._page is not None:
            return Progress(label, total, self._page.new_bar(), **options)
        if self._new_display is None:
            self._new_display = display_factory(_print)
        return Progress(label, total, self._new_display(), **options)


def _print(text: str) -> None:
    with above_bars():
        print(text, flush=True)


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


def _text(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
