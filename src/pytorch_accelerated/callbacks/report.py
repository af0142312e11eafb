"""A page in HTML that shows a run while it is running, and afterwards."""

from __future__ import annotations

import functools
import html
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback
from pytorch_accelerated.callbacks.warning import never_ends_a_run
from pytorch_accelerated.callbacks.watching import watched_metrics
from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.matching import require_kinds
from pytorch_accelerated.checkpointing.publish import replacing
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.models.wrappers import bare_model
from pytorch_accelerated.report.contents import RunContents, best_values, metric_columns, page_of, step_columns
from pytorch_accelerated.report.facts import environment_facts, model_facts
from pytorch_accelerated.report.predictions import PredictionsOfEvaluation, describe
from pytorch_accelerated.tracking.step_records import samples_per_second

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer

_SHARE_OF_WRITING = 0.02  # of the time of the run, at most
_MAX_EVENTS = 500
_MAX_SHOWN_SAMPLES = 64  # of a spike
_INPUT_NAMES = ("pixel_values", "images", "image", "inputs", "input", "x", "input_ids")


@never_ends_a_run
class ReportCallback(TrainerCallback):
    """Writes a page that shows the run: one HTML file, which needs no network and can be sent to others.

    ::

        Trainer(..., callbacks=[*DEFAULT_CALLBACKS, ReportCallback("report.html")])

    It shows curves that can be zoomed and read off, best values, events such as saves, skipped updates, warnings and
    spikes of the loss (of a `LossSpikeCallback`), the time and the waiting for data of each epoch, and what ran: model,
    optimizer, run config, versions, device, command line and git commit. With classes, it has a confusion matrix and a
    table by class of the last evaluation; and the samples with the highest loss and their indices in the evaluation
    set, as pictures where inputs are images. Put the callback after those that record metrics.

    The page is rewritten during the run, and is complete at any time. Rank 0 writes it, in at most 2 % of the time. A
    resumed run continues it. If something fails, there is one warning, and the run continues. An open page reloads
    itself. In a notebook, the callback as the last line of a cell shows the page, which is then saved with the
    notebook. ``python -m pytorch_accelerated compare`` shows several pages side by side.

    The page contains the command line, without values of options that look like secrets, and inputs of the evaluation
    set; see `num_samples`.

    Args:
        path: the file, which replaces an existing one. Missing folders are created.
        name: the title of the page; by default the name of the file's folder, or of the file.
        class_names: names by class; by default the `id2label` of the model's config, or numbers.
        num_samples: how many of the worst samples to show; 0 for none.
        notes: facts of your own to show, and to compare: plain values by name.
        seconds_between_writes: the least time between two writes, except at the end.
    """

    takes_part_in_preflight = False
    ranks_agree_after_each_update = False
    _told_apart_by = "path"

    def __init__(
        self,
        path: str | os.PathLike[str] = "report.html",
        *,
        name: str | None = None,
        class_names: Sequence[str] | None = None,
        num_samples: int = 12,
        notes: Mapping[str, Any] | None = None,
        seconds_between_writes: float = 10.0,
    ) -> None:
        self.path = Path(path)
        self.class_names = class_names
        self.num_samples = num_samples
        self.seconds_between_writes = seconds_between_writes
        stem = self.path.stem
        self._contents = RunContents(name or (self.path.absolute().parent.name if stem == "report" else stem) or stem)
        self._contents.notes = json.loads(json.dumps(dict(notes or {}), default=repr))
        self._seconds_before = 0.0  # of the runs that this one continues
        self._started = self._next_write = time.monotonic()
        self._predictions: PredictionsOfEvaluation | None = None
        self._evaluation_started = self._epoch_started = 0.0
        self._seconds_of_evaluation = 0.0
        self._seen_skips = self._seen_warnings = 0
        self._seen_best: dict[str, int | None] = {}
        self._seen_states = 0
        self._was_resumed = False
        self._trainer_ranks: Any = None

    def saved_places(self) -> dict[str, str]:
        """The page; for the summary of a run."""
        return {"report": str(self.path)}

    def __repr__(self) -> str:
        """The class and the path."""
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """For notebooks: the page, in a frame of its own."""
        try:
            page = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return f"<div>{html.escape(repr(self))}: there is no page yet. Train first.</div>"
        style = "width:100%;height:44em;border:1px solid rgba(128,128,128,.5);border-radius:.4em"
        return f"<iframe style='{style}' title='{html.escape(self.path.name)}' srcdoc='{html.escape(page)}'></iframe>"

    def get_predictions_and_targets(self, batch: Any, batch_output: dict[str, Any]) -> tuple[Any, Any]:
        """The outputs and targets that the page shows; (None, None) for none. Override it for other structures.

        Outputs of shape (samples, classes) with whole numbers as targets are logits. Outputs and targets of one
        floating-point shape are those of a regression. The page shows nothing of others.

        By default, these are `model_outputs` (or its entry "logits", if it is a dict) and the batch's second item (or
        its entry "labels", if it is a dict).

        Args:
            batch: on the trainer's device.
            batch_output: the output of `calculate_eval_batch_loss`.
        """
        outputs = batch_output.get("model_outputs")
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits")
        if isinstance(batch, Mapping):
            return outputs, batch.get("labels")
        return outputs, batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None

    def get_inputs(self, batch: Any) -> Any:
        """The inputs to show beside the worst samples: a tensor with a row for each sample, or None.

        By default, the first item of the batch, or an entry such as "pixel_values", if it is a dict.
        """
        if isinstance(batch, Mapping):
            return next((batch[name] for name in _INPUT_NAMES if name in batch), None)
        return batch[0] if isinstance(batch, (tuple, list)) and batch else None

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin the page."""
        resumed_from = trainer.run_context.resumed_from
        if not self._was_resumed:
            self._begin_anew(trainer)
        self._started = time.monotonic()
        self._seen_skips, self._seen_warnings = trainer.run_state.skipped_updates, 0
        self._seen_best = {key: callback.best_metric_epoch for key, callback in _savers_of_best(trainer)}
        self._describe_run(trainer)
        self._contents.state |= {"status": "running", "detail": ""}
        self._contents.state.setdefault("started", time.time())
        if resumed_from is not None:
            self._add_event(trainer, "resumed", f"from {resumed_from}")
        self._seen_states = len(trainer.run_context.saves.all)
        self._was_resumed = False
        self._write(trainer)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start the clock of the epoch."""
        self._epoch_started = time.monotonic()
        self._seconds_of_evaluation = 0.0

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Write the page, if it is time."""
        self._look_around(trainer)
        self._write_if_due(trainer)

    on_train_epoch_end = on_step_records

    def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Begin to collect predictions."""
        self._evaluation_started = time.monotonic()
        if not trainer.run_history.metric_name_prefix:  # otherwise it is the evaluation of another model
            is_binary = isinstance(trainer.loss_func, nn.BCEWithLogitsLoss)
            self._predictions = PredictionsOfEvaluation(self.num_samples, is_binary=is_binary)

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Collect the predictions of a batch, on the device."""
        if self._predictions is not None:
            predictions, targets = self.get_predictions_and_targets(batch, batch_output)
            start = trainer.run_context.position_in_pass
            self._predictions.add(predictions, targets, self.get_inputs(batch), start)

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Read the collected predictions, and write the page, if it is time."""
        if self._predictions is not None:
            ranks = trainer.run_context.ranks
            everyones = ranks.exchange(self._predictions.on_host())
            self._predictions = None
            if ranks.is_first:
                history = trainer.run_history
                of = f"epoch {history.current_epoch}"
                of = f"{of}, after update {history.updates_done}" if is_intermediate else of
                index_of = functools.partial(_index_at, trainer.run_context.loaders.eval)
                described = describe(everyones, self.num_samples, self._names_of_classes(trainer), of, index_of)
                self._contents.predictions[history.evaluation_set] = described
        self._seconds_of_evaluation += time.monotonic() - self._evaluation_started
        if is_intermediate:
            self._add_event(trainer, "evaluated", "within the epoch")
        self._look_around(trainer)
        self._write_if_due(trainer)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the times of the epoch, and write the page, if it is time."""
        self._look_around(trainer)
        timing = next(iter(trainer.run_history.timings[-1:]), None)
        epoch = trainer.run_history.current_epoch
        known = self._contents.epochs
        self._contents.epochs = [each for each in known if each["epoch"] != epoch]
        seconds = {"eval_seconds": self._seconds_of_evaluation, "wall_seconds": time.monotonic() - self._epoch_started}
        of_training = {} if timing is None else timing._asdict()
        self._contents.epochs.append({"seconds": None, **of_training, **seconds, "epoch": epoch})
        self._write_if_due(trainer)

    def on_stop_training_error(self, trainer: Trainer, reason: str = "", **kwargs: Any) -> None:
        """Note that and why the run stops."""
        self._contents.state |= {"status": "stopped", "detail": reason}
        self._add_event(trainer, "stopped", reason)

    def on_non_finite_loss(self, trainer: Trainer, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """Note the loss."""
        self._add_event(trainer, "loss not finite", f"{metric_name}, in batch {step} of epoch {epoch}")

    def on_loss_spike(
        self,
        trainer: Trainer,
        *,
        loss: float,
        median: float,
        first_update: int,
        last_update: int,
        samples: Sequence[int] | None,
        **kwargs: Any,
    ) -> None:
        """Note the spike that a `LossSpikeCallback` has found, with its samples."""
        since = "" if first_update == last_update else f" since update {first_update}"
        text = f"{loss:.4g}{since}, where the median was {median:.4g}"
        if samples:
            more = f" and {len(samples) - _MAX_SHOWN_SAMPLES} more" if len(samples) > _MAX_SHOWN_SAMPLES else ""
            text += f"; training samples {', '.join(map(str, samples[:_MAX_SHOWN_SAMPLES]))}{more}"
        epoch = trainer.run_state.epoch_of_progress(trainer.run_history.current_epoch)
        self._add_event_at(time.time(), epoch, last_update, "loss spike", text)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Complete the page."""
        self._was_resumed = False
        self._look_around(trainer)
        epoch = trainer.run_state.epoch_of_progress(trainer.run_history.current_epoch)
        for _, saver in _savers_of_best(trainer):
            if saver.best_metric_epoch not in (None, epoch):
                for part in self._contents.predictions.values():
                    part["of"] += f", while {saver.save_path} is from epoch {saver.best_metric_epoch}"
        if self._contents.state["status"] == "running":
            self._contents.state["status"] = "finished"
        self._write(trainer)

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        """Complete the page with the error, unless the run that it shows was over before."""
        self._was_resumed = False
        if self._contents.state.get("status") != "running":
            return
        what = f"{type(exception).__name__}: {exception}".strip(": ")
        self._contents.state |= {"status": "failed", "detail": what}
        self._add_event(trainer, "failed", what)
        self._write(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin a page, if no run has done so."""
        self._contents.predictions = {}
        if not self._contents.state:
            self._begin_anew(trainer)
            self._describe_run(trainer)
            self._contents.state |= {"status": "running", "detail": "", "started": time.time()}
            self._started = time.monotonic()

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Add the evaluation to the page, which keeps the curves of training."""
        contents = self._contents
        for part in contents.predictions.values():
            part["of"] = "evaluate()"
        values = {record.name: record.value for record in trainer.run_history.records if record.is_scalar}
        # Of the run that the page shows; the history may have begun anew.
        at = contents.state.get("epoch", 0), contents.state.get("updates", 0)
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._add_event_at(time.time(), *at, "evaluate()", text)
        if contents.state["status"] == "running":
            contents.state["status"] = "finished"
        self._write(trainer, keeps_curves=bool(contents.metrics))

    def state_dict(self) -> dict[str, Any]:
        """What the page shows besides the run history. Must be called by all ranks."""
        contents = self._contents
        parts = {name: getattr(contents, name) for name in _SAVED}
        saved = {**parts, "seconds": self._seconds(), "started": contents.state.get("started")}
        # As text: times differ between ranks, and a picture is no tensor.
        text = json.dumps(saved)
        text = text if self._trainer_ranks is None else self._trainer_ranks.from_first(text)
        return {"page": torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the page of the run that is being resumed."""
        require_kinds(state, {"page": (str, torch.Tensor)}, of=type(self).__name__)
        page = state["page"]
        saved = json.loads(page if isinstance(page, str) else page.numpy().tobytes())  # version 1.0 kept the text
        for name in _SAVED:
            setattr(self._contents, name, saved[name])
        self._seconds_before, self._started = saved["seconds"], time.monotonic()
        self._contents.state = {"status": "running", "detail": "", **self._contents.state}
        if saved["started"] is not None:
            self._contents.state["started"] = saved["started"]
        self._was_resumed = True

    def _begin_anew(self, trainer: Trainer) -> None:
        fresh = RunContents(self._contents.name, notes=self._contents.notes)
        if trainer.run_history.records:  # with `reset_run_history=False` it continues
            fresh.events, fresh.epochs = self._contents.events, self._contents.epochs
        self._contents = fresh
        self._seconds_before = 0.0

    def _describe_run(self, trainer: Trainer) -> None:
        ranks = self._trainer_ranks = trainer.run_context.ranks
        if ranks.is_first:
            model = bare_model(trainer.model)
            self._contents.model = model_facts(model, trainer.optimizer, trainer.loss_func, trainer.scheduler)
            self._contents.environment = environment_facts(ranks.device, ranks.count)
            self._contents.config = trainer.run_config.to_dict()

    def _names_of_classes(self, trainer: Trainer) -> Sequence[str] | None:
        if self.class_names is not None:
            return self.class_names
        labels = getattr(getattr(bare_model(trainer.model), "config", None), "id2label", None)
        return [str(labels[index]) for index in sorted(labels)] if isinstance(labels, Mapping) else None

    def _look_around(self, trainer: Trainer) -> None:
        """Find out what happened since the last look that has no event of its own."""
        skipped = trainer.run_state.skipped_updates
        if skipped > self._seen_skips:
            number = skipped - self._seen_skips
            self._add_event(trainer, "skipped", f"{number} update{'s' if number > 1 else ''}, gradients not finite")
        self._seen_skips = skipped
        texts = trainer.run_context.shown_warnings.texts
        for text in texts[self._seen_warnings :]:
            self._add_event(trainer, "warning", text)
        self._seen_warnings = len(texts)
        for key, saver in _savers_of_best(trainer):
            if saver.best_metric_epoch is not None and saver.best_metric_epoch != self._seen_best.get(key):
                self._seen_best[key] = saver.best_metric_epoch
                self._add_event(
                    trainer, "best model", f"{saver.watch_metric} {saver.best_metric:.4g}: {saver.save_path}"
                )
        states = trainer.run_context.saves.all
        for state in states[self._seen_states :]:
            self._add_event_at(state.seconds, state.epoch, state.update, "saved", str(state.path))
        self._seen_states = len(states)

    def _add_event(self, trainer: Trainer, what: str, text: str) -> None:
        history = trainer.run_history
        epoch = trainer.run_state.epoch_of_progress(history.current_epoch)
        self._add_event_at(time.time(), epoch, history.updates_done, what, text)

    def _add_event_at(self, seconds: float, epoch: int, update: int, what: str, text: str) -> None:
        """Add an event where it belongs by its time, in seconds since 1970."""
        events = self._contents.events
        events.append({"time": seconds, "epoch": epoch, "update": update, "what": what, "text": text})
        events.sort(key=lambda event: event["time"])
        del events[:-_MAX_EVENTS]

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _write_if_due(self, trainer: Trainer) -> None:
        if time.monotonic() >= self._next_write:
            self._write(trainer)

    def _write(self, trainer: Trainer, *, keeps_curves: bool = False) -> None:
        if not trainer.run_context.ranks.is_first:
            return
        began = time.monotonic()
        if not keeps_curves:
            self._read_history(trainer)
        self._contents.state |= {"updated": time.time(), "seconds_between_writes": self.seconds_between_writes}
        try:
            with replacing(self.path) as file:
                disk.write(file, page_of([self._contents], self._contents.name).encode())
        finally:
            ended = time.monotonic()
            self._next_write = ended + max(self.seconds_between_writes, (ended - began) / _SHARE_OF_WRITING)

    def _read_history(self, trainer: Trainer) -> None:
        history, contents = trainer.run_history, self._contents
        contents.metrics = metric_columns(history.records, trainer.run_context.evaluation_sets.names)
        contents.steps = step_columns(history.step_records)
        contents.best = best_values(contents.metrics, watched_metrics(trainer.callback_handler))
        epochs = [each.epoch for each in history.records[-1:]] + [each.epoch for each in history.step_records[-1:]]
        contents.state |= {
            "seconds": self._seconds(),
            "samples_per_second": samples_per_second(history.step_records),
            "epoch": max(epochs, default=0),
            "updates": history.updates_done,
            "skipped_updates": trainer.run_state.skipped_updates,
        }


_SAVED = ("events", "epochs", "predictions")


def _index_at(loader: Any, position: int) -> int | None:
    """The index in the dataset of the sample at a position of an evaluation; None if it is unknown."""
    indices = loader.indices(position, position + 1) if isinstance(loader, RunLoader) else None
    return indices[0] if indices else None


def _savers_of_best(trainer: Trainer) -> Iterator[tuple[str, SaveBestModelCallback]]:
    for callback in trainer.callback_handler:
        if isinstance(callback, SaveBestModelCallback):
            yield callback.state_key, callback
