"""The callback that writes the page of a run while it is running, and afterwards."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks import (
    Asked,
    MetricsCallback,
    SaveBestModelCallback,
    TrainerCallback,
    never_ends_a_run,
    predicts_next,
    watched_metrics,
)
from pytorch_accelerated.extras.report.contents import (
    RunContents,
    branch_facts,
    environment_facts,
    model_facts,
    plain_notes,
    shown_rows,
    spike_in_words,
    write_page,
)
from pytorch_accelerated.extras.report.predictions import PredictionsOfEvaluation, describe

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

_SHARE_OF_WRITING = 0.02  # of the time of the run, at most
_MAX_EVENTS = 500
_INPUT_NAMES = ("pixel_values", "images", "image", "inputs", "input", "x", "input_ids")
_SAVED = ("events", "epochs", "predictions")  # what a state has; the rest of the page is the run history's


@never_ends_a_run
class ReportCallback(TrainerCallback):
    """Writes a page that shows the run: one HTML file, which needs no network and can be sent to others.

    ::

        Trainer(..., callbacks=[*DEFAULT_CALLBACKS, ReportCallback("report.html")])

    It shows curves that can be zoomed and read off, best values, events such as saves, skipped updates and
    spikes of the loss (of a `LossSpikeCallback`), the time and the waiting for data of each epoch, and what ran: model,
    optimizer, run config, versions, device, command line and git commit. With classes, it has a confusion matrix and a
    table by class, with labels a table by label; and the samples with the highest loss and their indices in the
    evaluation set, as pictures where inputs are images. These are of the last evaluation or, where a
    `SaveBestModelCallback` loads the best model at the end, of that model. Put the callback after those that record
    metrics.

    The page is rewritten during the run, and is complete at any time. Rank 0 writes it, in at most 2 % of the time. A
    resumed run continues it. If something fails, there is one warning, and the run continues. An open page reloads
    itself. In a notebook, the callback as the last line of a cell shows the page, which is then saved with the
    notebook. ``python -m pytorch_accelerated compare`` shows pages side by side.

    The page contains the command line, without values of options that look like secrets, and inputs of the evaluation
    set; see `num_samples`.

    Args:
        path: the file, which replaces an existing one. Missing folders are created.
        name: the title of the page; by default the name of the file's folder, or of the file.
        class_names: names by class; by default the `id2label` of the model's config if it has as many, or numbers.
        num_samples: how many of the worst samples to show; 0 for none.
        notes: facts of your own to show, and to compare: plain values by name.
        seconds_between_writes: the least time between two writes, except at the end.
    """

    takes_part_in_preflight = False
    ranks_agree_after_each_update = False
    _told_apart_by = "path"
    _ranks: Any = None
    _predictions: PredictionsOfEvaluation | None = None
    _started = _next_write = _epoch_started = _evaluation_started = _evaluation_seconds = 0.0

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
        self._contents.notes = plain_notes(notes)
        self._seen: dict[str, int] = {}  # how many of what has no event of its own
        self._kept: list[Any] = [None, {}]  # the best model that is loaded at the end, and its predictions

    def saved_places(self) -> dict[str, str]:
        """The page; for the summary of a run."""
        return {"report": str(self.path)}

    def __repr__(self) -> str:
        """The class and the path."""
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """For notebooks: the page, in a frame of its own."""
        try:
            page = self._absolute(self.path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return f"<div>{html.escape(repr(self))}: there is no page yet. Train first.</div>"
        style = "width:100%;height:44em;border:1px solid rgba(128,128,128,.5);border-radius:.4em"
        return f"<iframe style='{style}' title='{html.escape(self.path.name)}' srcdoc='{html.escape(page)}'></iframe>"

    def get_predictions_and_targets(self, batch: Any, batch_output: dict[str, Any]) -> tuple[Any, Any]:
        """The outputs and targets that the page shows; (None, None) for none. Override it for other structures.

        The loss function, shapes and dtypes tell what they are, as for metrics by name, and so does a `MetricsCallback`
        of the run, by its `task`, `classes_dim`, `ignore_index` and `scores`. What has two readings is left out, with a
        line that says so.

        By default, these are `model_outputs` (or its entry "logits", if it is a dict) and the second item (or the entry
        "labels", if it is a dict) of the batch, or of the one that a hook has passed on to the default one.

        Args:
            batch: on the trainer's device.
            batch_output: the output of `calculate_eval_batch_loss`.
        """
        outputs, batch = batch_output.get("model_outputs"), batch_output.get("batch", batch)
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits")
        if isinstance(batch, Mapping):
            return outputs, batch.get("labels")
        return outputs, batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None

    def get_inputs(self, batch: Any) -> Any:
        """The inputs to show with the worst samples: a tensor with a row for each sample, or None.

        By default, the first item of the batch, or an entry such as "pixel_values", if it is a dict.
        """
        if isinstance(batch, Mapping):
            return next((batch[name] for name in _INPUT_NAMES if name in batch), None)
        return batch[0] if isinstance(batch, (tuple, list)) and batch else None

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin the page, or continue the page of the run that is being resumed."""
        if self._contents.state.get("status") != "running":  # no state was loaded
            self._begin(trainer)
        self._describe_run(trainer)
        events = self._contents.events
        self._note_news(trainer)
        self._contents.events = events
        resumed_from = trainer.run_context.asked.resumed_from
        if resumed_from is not None:
            self._add_event(trainer, "resumed", f"from {resumed_from}")
        left_out = trainer.run_context.asked.left_out
        if left_out and trainer.run_context.asked.settings.leave_out is not None:  # else an earlier event has it
            self._add_event(trainer, "left out", "; ".join(map(str, left_out)))
        self._write(trainer)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start the clock of the epoch."""
        self._epoch_started, self._evaluation_seconds = time.monotonic(), 0.0

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Note what happened, and write the page, if it is time."""
        self._note_news(trainer)
        if time.monotonic() >= self._next_write:
            self._write(trainer)

    on_train_epoch_end = on_step_records

    def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Begin to collect predictions."""
        self._keep_best_predictions(trainer.callback_handler)  # by now all callbacks have judged those so far
        self._evaluation_started = time.monotonic()
        if not trainer.run_history.metric_name_prefix:  # otherwise it is the evaluation of another model
            is_own = type(self).get_predictions_and_targets is not ReportCallback.get_predictions_and_targets
            is_said = any(
                isinstance(each, MetricsCallback) and each.targets == "labels" for each in trainer.callback_handler
            )
            is_own_loss = trainer.loss_func is None and not is_own and not is_said
            is_next = predicts_next(trainer.get_model()) if is_own_loss else False
            self._predictions = PredictionsOfEvaluation(
                self.num_samples, trainer.loss_func, _asked(trainer.callback_handler), is_next
            )

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Collect the predictions of a batch, on the device."""
        if self._predictions is not None:
            predictions, targets = self.get_predictions_and_targets(batch, batch_output)
            inputs, start = self.get_inputs(batch), trainer.run_context.parts.reports.position_in_pass
            if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor) and len(inputs) != len(targets):
                start = None  # a hook has left rows out, and nobody knows which
            self._predictions.add(predictions, targets, inputs, start)

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Read the collected predictions, and write the page, if it is time."""
        history, ranks = trainer.run_history, trainer.run_context.parts.ranks
        if self._predictions is not None:
            per_rank = ranks.exchange(self._predictions.on_host())
            self._predictions = None
            if ranks.is_first:
                of = f"epoch {history.current_epoch}"
                of = f"{of}, after update {history.updates_done}" if is_intermediate else of
                # The loader of the run knows the samples at its positions; another one need not.
                indices = getattr(trainer.run_context.parts.loaders.eval, "indices", lambda start, stop: None)
                labels = getattr(getattr(trainer.get_model(), "config", None), "id2label", None)
                usual = [str(labels[index]) for index in sorted(labels)] if isinstance(labels, Mapping) else None
                found = describe(
                    per_rank, self.class_names, of, lambda at: next(iter(indices(at, at + 1) or ()), None), usual
                )
                self._contents.predictions[history.evaluation_set] = found | {"epoch": history.current_epoch}
        self._evaluation_seconds += time.monotonic() - self._evaluation_started
        if is_intermediate:
            self._add_event(trainer, "evaluated", "within the epoch")
        self.on_step_records(trainer)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the times of the epoch and a slow rank, and write the page, if it is time."""
        epoch = trainer.run_history.current_epoch
        of_training = [timing._asdict() for timing in trainer.run_history.timings[-1:]]
        times = {
            **(of_training[0] if of_training else {"seconds": None}),
            "eval_seconds": self._evaluation_seconds,
            "wall_seconds": time.monotonic() - self._epoch_started,
            "epoch": epoch,
        }
        self._contents.epochs = [each for each in self._contents.epochs if each["epoch"] != epoch] + [times]
        slow_rank = trainer.run_history.slow_rank
        if slow_rank is not None:
            self._add_event(trainer, "slow rank", slow_rank.in_words())
        self.on_step_records(trainer)

    def on_stop_training_error(self, trainer: Trainer, reason: str = "", **kwargs: Any) -> None:
        """Note that and why the run stops."""
        self._contents.state |= {"status": "stopped", "detail": reason}
        self._add_event(trainer, "stopped", reason)

    def on_non_finite_loss(self, trainer: Trainer, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """Note the loss."""
        self._add_event(trainer, "loss not finite", f"{metric_name}, in batch {step} of epoch {epoch}")

    def on_loss_spike(self, trainer: Trainer, *, samples: Sequence[Any] | None, **spike: Any) -> None:
        """Note the spike that a `LossSpikeCallback` has found, with its rows."""
        rows = {} if samples is None else {"rows": shown_rows(samples), "number_of_rows": len(samples)}
        text = spike_in_words(samples=None, **spike)
        self._add_event(trainer, "loss spike", text, update=spike["last_update"], **rows)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Complete the page, with the predictions of the model that is loaded."""
        self._note_news(trainer)
        best = self._keep_best_predictions(trainer.callback_handler)
        kept = {name: found for name, found in self._kept[1].items() if best and found["epoch"] == best[0]}
        for name, found in kept.items():
            self._contents.predictions[name] = found | {"of": f"{found['of']}, the weights loaded at the end"}
        if self._contents.state["status"] == "running":
            self._contents.state["status"] = "finished"
        self._write(trainer)

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        """Complete the page with the error, unless the run that it shows was over before."""
        if self._contents.state.get("status") == "running":
            what = f"{type(exception).__name__}: {exception}".strip(": ")
            self._contents.state |= {"status": "failed", "detail": what}
            self._add_event(trainer, "failed", what)
            self._write(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin a page, if no run has done so."""
        if not self._contents.state:
            self._begin(trainer)
            self._describe_run(trainer)
        self._contents.predictions = {}

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Add the evaluation to the page, which keeps the curves of training."""
        contents, history = self._contents, trainer.run_history
        for part in contents.predictions.values():
            part["of"] = "evaluate()"
        values = {record.name: record.value for record in history.records if record.is_scalar}
        # The page shows one run; the history may since have been reset for the next.
        at = {"epoch": contents.state.get("epoch", 0), "update": contents.state.get("updates", 0)}
        self._add_event(trainer, "evaluate()", ", ".join(f"{name} {value:.4g}" for name, value in values.items()), **at)
        if contents.state["status"] == "running":
            contents.state["status"] = "finished"
        self._write(trainer, keeps_curves=bool(contents.metrics))

    def state_dict(self) -> dict[str, Any]:
        """What the page shows besides the run history. Must be called by all ranks."""
        parts = {name: getattr(self._contents, name) for name in _SAVED}
        seconds, started = time.monotonic() - self._started, self._contents.state.get("started")
        # Text, because times differ between ranks, and pictures aren't tensors.
        text = json.dumps({**parts, "kept": self._kept, "seconds": seconds, "started": started})
        text = text if self._ranks is None else self._ranks.from_first(text)
        return {"page": torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the page of the run that is being resumed."""
        page = state["page"]
        # Version 1.0 kept the text.
        saved = json.loads(page if isinstance(page, str) else page.numpy().tobytes())
        for name in _SAVED:
            setattr(self._contents, name, saved[name])
        self._kept = saved.get("kept", [None, {}])
        self._started = time.monotonic() - saved["seconds"]
        started = saved["started"] or time.time()
        self._contents.state |= {"status": "running", "detail": "", "started": started}

    def _begin(self, trainer: Trainer) -> None:
        fresh = RunContents(self._contents.name, notes=self._contents.notes)
        if trainer.run_history.records:  # with `reset_run_history=False` it continues
            fresh.events, fresh.epochs = self._contents.events, self._contents.epochs
        else:
            self._kept = [None, {}]
        fresh.state = {"status": "running", "detail": "", "started": time.time()}
        self._contents, self._started = fresh, time.monotonic()

    def _describe_run(self, trainer: Trainer) -> None:
        self._ranks = trainer.run_context.parts.ranks
        if self._ranks.is_first:
            parts = trainer.model, trainer.optimizer, trainer.scheduler, trainer.loss_func
            self._contents.model = model_facts(*parts)
            self._contents.branch = branch_facts(trainer.run_context.asked.branch_of)
            self._contents.environment = environment_facts(self._ranks.device, self._ranks.count)
            config = self._contents.config = trainer.run_config.to_dict()
            if trainer.run_context.asked.given.seed is None:  # not what somebody chose, so not what runs differ in
                seeds = {"torch_seed": torch.initial_seed(), "derived_seed": config.pop("seed")}
                self._contents.environment |= seeds

    def _keep_best_predictions(self, callbacks: Iterable[Any]) -> list[Any] | None:
        """Epoch and value of the best model so far, if it will be loaded; its predictions are kept."""
        best = None
        for saver in callbacks:
            if isinstance(saver, SaveBestModelCallback) and saver.load_saved_checkpoint and saver.best_metric_epoch:
                best = [saver.best_metric_epoch, saver.best_metric]
        if best not in (None, self._kept[0]):
            self._kept = [best, dict(self._contents.predictions)]
        return best

    def _new(self, kind: str, all_so_far: Sequence[Any]) -> Sequence[Any]:
        """Those that have come since the last call for this kind."""
        seen, self._seen[kind] = self._seen.get(kind, 0), len(all_so_far)
        return all_so_far[seen:]

    def _note_news(self, trainer: Trainer) -> None:
        """Add events for what has no event of its own."""
        run = trainer.run_context
        skipped = len(self._new("skipped", range(run.parts.state.skipped_updates)))
        if skipped:
            self._add_event(trainer, "skipped", f"{skipped} update{'s' if skipped > 1 else ''}, gradients not finite")
        for saver in trainer.callback_handler:
            if isinstance(saver, SaveBestModelCallback):
                value = f"{saver.watch_metric} {saver.best_metric or 0.0:.4g}: {saver.save_path}"
                if self._new(f"best model {saver.save_path}", range(saver.best_metric_epoch or 0)):
                    self._add_event(trainer, "best model", value)
        for state in self._new("saved", run.control.saves.all):
            at = {"time": state.seconds, "epoch": state.epoch, "update": state.update}
            self._add_event(trainer, "saved", str(state.path), **at)

    def _add_event(self, trainer: Trainer, what: str, text: str, **at: Any) -> None:
        """Add an event where it belongs by its time; by default it is of now."""
        history = trainer.run_history
        epoch = trainer.run_state.epoch_of_progress(history.current_epoch)
        now = {"time": time.time(), "epoch": epoch, "update": history.updates_done}
        events = [*self._contents.events, {**now, **at, "what": what, "text": text}]
        self._contents.events = sorted(events, key=lambda event: event["time"])[-_MAX_EVENTS:]

    def _write(self, trainer: Trainer, *, keeps_curves: bool = False) -> None:
        if not trainer.run_context.parts.ranks.is_first:
            return
        began, contents = time.monotonic(), self._contents
        if not keeps_curves:
            watched = watched_metrics(trainer.callback_handler)
            contents.read_history(trainer.run_history, watched, trainer.run_context.control.evaluation_sets.names)
            skipped = trainer.run_state.skipped_updates
            contents.state |= {"seconds": began - self._started, "skipped_updates": skipped}
        contents.state |= {"updated": time.time(), "seconds_between_writes": self.seconds_between_writes}
        try:
            write_page([contents], contents.name, self._absolute(self.path))
        finally:
            ended = time.monotonic()
            self._next_write = ended + max(self.seconds_between_writes, (ended - began) / _SHARE_OF_WRITING)


def _asked(callbacks: Iterable[Any]) -> Asked:
    """What the metrics callbacks of the run that take outputs and targets as they are say of them, if they agree."""
    usual = MetricsCallback.get_predictions_and_targets
    all_asked = {
        dataclasses.replace(each.asked, average=None)
        for each in callbacks
        if isinstance(each, MetricsCallback) and type(each).get_predictions_and_targets is usual
        if each.predictions in (None, "argmax", "logits") and each.targets in (None, "labels")
    } - {Asked()}
    return all_asked.pop() if len(all_asked) == 1 else Asked()
