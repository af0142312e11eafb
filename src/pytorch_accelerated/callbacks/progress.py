"""Callbacks that show a run on the screen: a line at its start and end, bars, and a table of the metrics.

Subclasses in existing scripts call neither `__init__` nor every event of these classes, so no state depends on them:
defaults are class attributes, or created at first use.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.trees import length_of
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.bars import LineDisplay, Progress, new_display, new_page
from pytorch_accelerated.record.text import (
    GrowingTable,
    block,
    folded,
    format_count,
    format_duration,
    format_number,
    format_rate,
    format_update_size,
    screen_columns,
)
from pytorch_accelerated.record.values import name_in_set, role_and_quantity
from pytorch_accelerated.record.watching import best_facts, watched_metrics, with_mark

if TYPE_CHECKING:
    import torch

    from pytorch_accelerated.facts.run_state import RunState
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.record.history import RunHistory
    from pytorch_accelerated.record.loss import LossTracker
    from pytorch_accelerated.record.step_records import EpochTiming
    from pytorch_accelerated.run_config import TrainerRunConfig

_SHARE_WORTH_SHOWING = 0.05  # of waiting for data
_MINOR_COLUMNS = ("lr", "time")  # at the right of the table
_MAIN_LOSS = "train_loss_epoch"


class PrintProgressCallback(TrainerCallback):
    """Prints a line about the plan of a run, and a line about its result.

    >>> callbacks = [PrintProgressCallback]  # a plan and a result, without bars and table
    """

    takes_part_in_preflight = False
    recorded_names = ()

    _started: float | None = None
    _first_update = 0
    _ending, _reason = "Finished", ""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Print, for example, "Training 10 epochs of 45 updates, 32 samples each, on cpu, seed 42".

        The seed is there if the user gave one.
        """
        self._started, self._first_update = time.perf_counter(), trainer.run_state.updates
        self._ending, self._reason = "Finished", ""
        config = trainer.run_config
        precision = None if config.mixed_precision == "no" else config.mixed_precision
        seed = None if trainer.run_context.asked.given.seed is None else f"seed {config.seed}"
        where = _where(trainer.device, config.num_processes)
        parts = [f"Training {_length_of(config)}", _sizes_of(config), where, precision, seed]
        trainer.print(folded(", ".join(filter(None, parts))))

    def on_stop_training_error(
        self, trainer: Trainer, reason: str = "", failure: Exception | None = None, **kwargs: Any
    ) -> None:
        """Remember the reason for the end of the run."""
        if failure is None:
            self._ending, self._reason = "Stopped early after", reason
        else:  # its message will follow
            self._ending, self._reason = "Failed after", type(failure).__name__

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Print, for example, "Finished 10 epochs, 450 updates in 12.3s", or why the run stopped early, and a summary.

        The summary has the best value with its epoch, the speed, and what was
        saved where.
        """
        state = trainer.run_state
        reason = f": {self._reason}" if self._reason else ""
        skipped = f" ({state.skipped_updates} skipped)" if state.skipped_updates else ""
        new = f", the last {state.updates - self._first_update}" if self._first_update else ""
        duration = "" if self._started is None else f"{new} in {format_duration(time.perf_counter() - self._started)}"
        epochs, updates = format_count(state.epochs, "epoch"), format_count(state.updates, "update")
        trainer.print(folded(f"{self._ending} {epochs}, {updates}{skipped}{duration}{reason}"))
        for line in _summary_lines(trainer.run_history, list(trainer.callback_handler)):
            trainer.print(folded(line))

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Print, for example, "Evaluating 12 batches of 32 samples, on cpu"."""
        samples, processes = trainer.run_config.eval_total_batch_size, trainer.run_config.num_processes
        batches = [length_of(loader) for loader in trainer.run_context.parts.loaders.all_eval]
        work = "a stream" if None in batches else format_count(sum(filter(None, batches)), "batch", "batches")
        work = work if len(batches) == 1 else f"{len(batches)} sets, {work}"
        of_samples = "" if samples is None else f" of {format_count(samples, 'sample')}"
        trainer.print(folded(f"Evaluating {work}{of_samples}, {_where(trainer.device, processes)}"))


class ProgressBarCallback(TrainerCallback):
    """Shows the progress of each pass over the data: a bar in terminals, occasional lines elsewhere.

    A notebook has one display for each training run, which is updated in place: bars, and the table of
    `LogMetricsCallback`. `docs/how_to/notebooks.md` shows it.

    >>> callbacks = [ProgressBarCallback]  # one of the default callbacks
    """

    ranks_agree_after_each_update = False
    takes_part_in_preflight = False
    recorded_names = ()

    _open: tuple[Progress, ...] = ()  # the innermost pass is last: an evaluation inside a training epoch
    _lines: LineDisplay | None = None

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Find out where the output goes."""
        self.on_evaluation_run_start(trainer)
        run = trainer.run_context
        # A page belongs to the whole run: a callback before this one may have opened it.
        if run.page is None and run.parts.ranks.is_first_of_node:
            run.page = new_page(_MINOR_COLUMNS)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Open the bar of an epoch."""
        self._close_all()
        config, state, run = trainer.run_config, trainer.run_state, trainer.run_context
        # The history may continue an earlier run, whose epochs `num_epochs` leaves out.
        epoch = trainer.run_history.current_epoch
        last = "" if config.num_epochs is None else f"/{epoch + config.num_epochs - state.epochs - 1}"
        options: Any = {"size": config.train_per_device_batch_size, "done": state.batches_in_epoch}
        batches = _batches_of_epoch(run.parts.loaders.train, config, state)
        reports = run.parts.reports

        def facts() -> dict[str, str]:
            return _facts(reports.losses, trainer.optimizer, reports.epoch_clock.read())

        self._start_pass(trainer, f"epoch {epoch}{last}", batches, read_facts=facts, **options)

    def on_train_step_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Count a batch."""
        if self._open:
            self._open[-1].advance()

    on_eval_step_end = on_prediction_step_end = on_train_step_end

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Hand the losses so far to the display of a notebook."""
        if trainer.run_context.page is not None:
            trainer.run_context.page.show_losses([each.train_loss for each in trainer.run_history.step_records])

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Remove all bars, also after an early stop."""
        self._close_all()

    on_training_run_end = on_evaluation_run_end = on_train_epoch_end

    def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Open the bar of an evaluation."""
        name, run = trainer.run_history.evaluation_set, trainer.run_context
        label, size = f"evaluation of {name}" if name else "evaluation", trainer.run_config.eval_per_device_batch_size
        facts = functools.partial(_facts, run.parts.reports.losses)
        self._start_pass(trainer, label, length_of(run.parts.loaders.eval), size=size, read_facts=facts)

    def on_eval_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Remove the bar."""
        self._close_innermost()

    on_prediction_run_end = on_eval_epoch_end

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Forget where the output of the last run went."""
        self._close_all()
        self._lines = None

    def on_prediction_run_start(self, trainer: Trainer, num_batches: int | None = None, **kwargs: Any) -> None:
        """Open the bar of a prediction, which may be inside another run."""
        self._start_pass(trainer, "prediction", num_batches)

    def on_stop_training_error(self, trainer: Trainer, reason: str = "", **kwargs: Any) -> None:
        """Remove the bar."""
        self._close_all()
        if trainer.run_context.page is not None:
            trainer.run_context.page.note_end(f"Stopped early: {reason}" if reason else "Stopped early")

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        """Remove the bar, so that the traceback starts on a new line."""
        self._close_all()
        if trainer.run_context.page is not None:
            epoch, updates = trainer.run_history.current_epoch, trainer.run_history.updates_done
            where = f"in epoch {epoch}, after {format_count(updates, 'update')}"
            trainer.run_context.page.note_end(f"Ended by {type(exception).__name__} {where}")

    def _start_pass(
        self, trainer: Trainer, label: str, total: int | None, *, done: int = 0, size: int | None = None, **options: Any
    ) -> None:
        page, ranks = trainer.run_context.page, trainer.run_context.parts.ranks
        if not ranks.is_first_of_node:
            return
        times = -(-(trainer.run_context.asked.given.lanes or 1) // ranks.count)  # a rank has a batch for each lane
        options |= {"samples_per_batch": size and size * ranks.count, "done": done * times}
        self._lines = self._lines or LineDisplay(trainer.print)
        # One `LineDisplay` serves all passes, so that a long run prints lines less and less often.
        display = new_display(self._lines) if page is None else page.new_bar()
        self._open = (*self._open, Progress(label, total and total * times, display, **options))

    def _close_innermost(self) -> None:
        if self._open:
            self._open[-1].close()
            self._open = self._open[:-1]

    def _close_all(self) -> None:
        while self._open:
            self._close_innermost()


class LogMetricsCallback(TrainerCallback):
    """Passes new values of the run history to `log_metrics`, which prints them as a table by default.

    Metrics whose names start with "train" are logged at the end of a training epoch, other metrics after an evaluation,
    and later ones at the end of the epoch. Each value is logged once. Each of two loggers gets every value.

    In the table, an epoch and its evaluation are one row. An evaluation within an epoch has its own row, such as
    "3 @120" for epoch 3 after update 120. A "*" marks a new best value of the metric that decides which epoch is the
    best: the one that a callback watches, else the loss of evaluations. The metrics of `Trainer.evaluate` are printed
    in one line. In a notebook, the display of `ProgressBarCallback` has the table.

    Evaluations come first. Where they have a metric, the value of training stays out of the table, except the loss.

    >>> callbacks = [..., LogMetricsCallback(train_metrics=True)]  # in place of the default one

    Args:
        train_metrics: True to show them all the same: ``callbacks=[..., LogMetricsCallback(train_metrics=True)]``
    """

    takes_part_in_preflight = False
    recorded_names = ()
    counts_once = True  # scripts add it to the defaults under its other name; each line would be printed twice

    _row: dict[str, str] | None = None  # the row that is being filled, if there is one
    _epoch_started: float | None = None
    _resumes_epoch = False
    train_metrics = False

    def __init__(self, *, train_metrics: bool = False) -> None:
        self.train_metrics = train_metrics

    def log_metrics(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Log the metrics; the default prints them once per node. Called on every rank. Override this to log elsewhere.

        Args:
            trainer: the trainer.
            metrics: the values by name; only numbers. Metrics of other types are in the run history. The default
                leaves out those that were recorded with ``shown=False``, and a second name of the same value.
        """
        hidden = trainer.run_history.names_not_shown
        if first_set := trainer.run_context.control.evaluation_sets.names[0]:  # its values have two names each
            hidden = hidden | {name_in_set(name, first_set) for name in metrics}
        cells = {name: format_number(value) for name, value in metrics.items() if name not in hidden}
        # An epoch logs twice, after training and after its evaluation, and has one row, which waits for both.
        if self._row is not None:
            self._row.update(cells)
        else:
            trainer.print("\n".join(block(cells, columns=screen_columns())))

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start a new table."""
        self._row = None
        self._table = GrowingTable(_MINOR_COLUMNS)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start the clock."""
        self._print_row(trainer)
        self._epoch_started, self._resumes_epoch = time.perf_counter(), trainer.run_state.updates_in_epoch > 0

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the metrics of the training epoch."""
        self._start_row(trainer, f"{trainer.run_history.current_epoch}")
        self._log_updated(trainer, "train")

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Log the metrics of the evaluation."""
        title = f"{trainer.run_history.current_epoch} @{trainer.run_state.updates}"
        # A further evaluation set continues the row of the first.
        if is_intermediate and (self._row is None or self._row["epoch"] != title):
            self._start_row(trainer, title)
        self._log_updated(trainer, "other")
        if is_intermediate and trainer.run_context.control.evaluation_sets.is_last:
            self._print_row(trainer)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log remaining metrics, for example of an epoch without an evaluation, and print the row.

        If the others waited for a rank, a line says so.
        """
        self._log_updated(trainer, "train", "other")
        self._print_row(trainer)
        slow_rank = trainer.run_history.slow_rank
        if slow_rank is not None:
            trainer.print(slow_rank.in_words())

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log remaining metrics."""
        self._log_updated(trainer, "train", "other")

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Print an unfinished row, such as the metrics of an epoch whose evaluation failed."""
        self._print_row(trainer)

    on_stop_training_error = on_exception = on_training_run_end

    @functools.cached_property
    def _table(self) -> GrowingTable:
        return GrowingTable(_MINOR_COLUMNS)

    def _log_updated(self, trainer: Trainer, *kinds: str) -> None:
        metrics: dict[str, float] = {}
        for kind in kinds:
            # The history knows what each reader has seen, also after a resume.
            records = trainer.run_history.read_new_records(f"{self.state_key} {kind}")
            of_kind = [each for each in records if each.name.startswith("train") == (kind == "train")]
            metrics |= {record.name: float(record.value) for record in of_kind if record.is_scalar}
        if metrics:
            self.log_metrics(trainer, metrics)

    def _start_row(self, trainer: Trainer, title: str) -> None:
        self._print_row(trainer)
        # The row has the rate from when the training of the epoch ended: schedulers may step before it is complete.
        self._row = {"epoch": title, **_learning_rate(trainer.optimizer)}

    def _print_row(self, trainer: Trainer) -> None:
        row, self._row = self._row, None
        # It has no metrics if `log_metrics` is overridden.
        if row is None or row.keys() <= {"epoch", *_MINOR_COLUMNS}:
            return
        page = trainer.run_context.page
        if self._epoch_started is not None:
            seconds = time.perf_counter() - self._epoch_started
            row["time"] = "" if self._resumes_epoch else format_duration(seconds)  # the part before isn't known here
        watched = watched_metrics(trainer.callback_handler)
        row = self._in_order(with_mark(row, trainer.run_history, watched), {"epoch", _MAIN_LOSS, *watched}, trainer)
        if page is None:
            trainer.print(self._table.add_row(row))
        else:
            page.add_row(row)

    def _in_order(self, row: dict[str, str], in_front: set[str], trainer: Trainer) -> dict[str, str]:
        """The row with evaluations in front of the others, and without metrics of training that these have, too."""
        sets = trainer.run_context.control.evaluation_sets.names
        of_training = {name for name in row if name.startswith("train_") and name not in in_front}
        if not self.train_metrics:
            evaluated = {name for name in of_training for each in sets if name_in_set(f"eval{name[5:]}", each) in row}
            row = {name: value for name, value in row.items() if name not in evaluated}
        order = sorted(row, key=lambda name: 0 if name in in_front else 2 - ("eval" in role_and_quantity(name)[0]))
        return {name: row[name] for name in order}


PrintMetricsCallback = LogMetricsCallback


def _facts(losses: LossTracker, optimizer: Any = None, timing: EpochTiming | None = None) -> dict[str, str]:
    """What a bar shows besides counts: the loss so far, the learning rate, and waiting for data if it is long."""
    loss = losses.peek()
    facts = ({} if loss is None else {"loss": format_number(loss)}) | _learning_rate(optimizer)
    if timing is not None and timing.is_slowed_by_data(_SHARE_WORTH_SHOWING):
        facts["data_wait"] = f"{timing.data_wait_share:.0%}"
    return facts


def _learning_rate(optimizer: Any) -> dict[str, str]:
    """The rate of the first parameter group; nothing if the user steps optimizers that the trainer does not know."""
    return {} if optimizer is None else {"lr": f"{float(optimizer.param_groups[0]['lr']):.2e}"}


def _batches_of_epoch(loader: Any, config: TrainerRunConfig, state: RunState) -> int | None:
    """The batches of this rank until the end of the epoch, or of the run within the epoch."""
    batches = length_of(loader)
    if config.max_num_train_steps is None:
        return batches
    updates_left = config.max_num_train_steps - (state.updates - state.updates_in_epoch)
    batches_left = Accumulation.of(config).batches(updates_left)
    return batches_left if batches is None else min(batches, batches_left)


def _where(device: torch.device, processes: int) -> str:
    return f"on {device}" if processes == 1 else f"on {processes} processes ({device.type})"


def _length_of(config: TrainerRunConfig) -> str:
    """Text such as "10 epochs of 45 updates"."""
    epochs = "epochs" if config.num_epochs is None else format_count(config.num_epochs, "epoch")
    updates = "" if config.max_num_train_steps is None else format_count(config.max_num_train_steps, "update")
    if config.num_update_steps_per_epoch is None:  # a stream
        return updates or epochs
    each = format_count(config.num_update_steps_per_epoch, "update")
    whole = (config.num_epochs or 0) * config.num_update_steps_per_epoch
    is_whole = config.max_num_train_steps in (None, whole)  # None: it is unknown when the run ends
    return f"{epochs} of {each}" if is_whole else f"{updates} ({epochs} of {each})"


def _sizes_of(config: TrainerRunConfig) -> str:
    per_device, accumulated = config.train_per_device_batch_size, config.gradient_accumulation_steps
    if per_device is None or accumulated is None:
        return ""
    return format_update_size(per_device, accumulated, config.num_processes, config.lanes)


def _summary_lines(history: RunHistory, callbacks: list[Any]) -> list[str]:
    """A line of results, and what callbacks have saved where, as they say with a method `saved_places`."""
    facts = best_facts(history, watched_metrics(callbacks))
    last = history.step_records[-1] if history.step_records else None
    facts += [speed_in_words(last.samples / last.seconds)] if last is not None and last.seconds else []
    seconds = sum(timing.seconds for timing in history.timings)
    waited = sum(timing.data_wait_seconds for timing in history.timings)
    if facts and waited > _SHARE_WORTH_SHOWING * seconds:
        facts.append(f"waited for data {waited / seconds:.0%} of the time")
    savers = [callback.saved_places() for callback in callbacks if hasattr(callback, "saved_places")]
    places = {path: what for saved in savers for what, path in saved.items()}
    return [line for line in (", ".join(facts), saved_line(places)) if line]


def saved_line(places: Mapping[str, str]) -> str:
    """What was saved, by path; empty if nothing was."""
    return "Saved: " + ", ".join(f"{what} {path}" for path, what in places.items()) if places else ""


def speed_in_words(speed: float) -> str:
    """A speed over a whole run, in samples per second."""
    return f"{format_rate(speed)} samples/s of wall time"
