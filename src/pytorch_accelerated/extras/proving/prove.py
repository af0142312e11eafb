"""Trains a few updates of a run in all ways that must give the same, and names what makes them differ."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.looking.rehearsal import refuse, taking_part
from pytorch_accelerated.extras.proving import children
from pytorch_accelerated.extras.proving.children import Job, NotCheckedError
from pytorch_accelerated.extras.proving.outside import Outside, differing_in, hooks_of
from pytorch_accelerated.extras.proving.replay import NOT_TAKEN, trained_again
from pytorch_accelerated.extras.proving.trace import PARTS, FirstUpdate, Parting, Trace, UpdateTrace, first_parting
from pytorch_accelerated.facts import LIMITS, check_positive_count
from pytorch_accelerated.loop import overrides
from pytorch_accelerated.record.text import aligned

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

SAME, ROUNDING, DIFFERENCE = "same bits", "equal to rounding", "difference"
KNOWN, NOT_CHECKED = "known difference", "not checked"
_AGAIN, _RESUMED = "again", "resumed at each update"
_ORDER = "another one in a new process: sort what comes from a set or folder, and call `set_seed` before what is random"
# What neither a state nor this process gives back, and nobody can name.
_OUTSIDE = "a clock, a file, the environment, a thread, or another source that was not found"
_BY_ITSELF = {
    "batch": f"the rows depend on {_OUTSIDE}",
    "losses": f"the forward pass or the loss depends on {_OUTSIDE}",
    "gradients": "an operation is not deterministic: `torch.use_deterministic_algorithms(True)` names it",
    "settings": f"a callback or the schedule depends on {_OUTSIDE}",
}
_CLOCK = f"it depends on {_OUTSIDE}"
_UNKNOWN = "it depends on something that no state saves, and that was not found among what your objects keep"
_SECONDS_OF_CHILD = 120
_UPDATES_OF_EPOCH, _MOST_NAMED, _MOST_TRIED = 3, 3, 12


class Check(NamedTuple):
    """One way to train the same updates.

    Attributes:
        check: what was done.
        verdict: "same bits", "equal to rounding", "difference", "known difference" (batch statistics) or "not checked".
        update: the first one that differs; None if none does.
        culprit: what differs, and why; what a resume loses without an effect so far; or why it was not checked.
    """

    check: str
    verdict: str
    update: int | None = None
    culprit: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Proof:
    """The results of `Trainer.prove`; ``print(proof)`` shows them.

    Attributes:
        updates: how many were trained.
        rows: the checks.
        not_checked: what was not, besides the rows that say so.
    """

    updates: int
    rows: tuple[Check, ...]
    not_checked: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether no check found a difference. What was not checked does not count."""
        return all(row.verdict != DIFFERENCE for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        rows = [row._asdict() for row in self.rows]
        facts = {"updates": self.updates, "is_exact": self.is_exact, "rows": rows}
        return {**facts, "not_checked": list(self.not_checked)}

    def __repr__(self) -> str:
        shown = [(f"  {row.check}", row.verdict, str(row.update or ""), row.culprit) for row in self.rows]
        head = f"{self.updates} updates, trained uninterrupted and in {len(self.rows)} other ways:"
        missing = [f"  not checked: {each}" for each in self.not_checked]
        return "\n".join([head, *aligned([("  ", "verdict", "update", "why"), *shown], [2]), *missing])


def prove(trainer: Trainer, train_dataset: Any, updates: int, factory: Any, given: Mapping[str, Any]) -> Proof:
    """The proof of `Trainer.prove`."""
    check_positive_count("updates", updates)
    refuse(given, NOT_TAKEN, by="prove")
    if trainer.run_context.ranks.count > 1 or children.is_child():
        raise ConfigurationError(
            "`prove` was called in one of several processes, but it starts those that it needs. Call it in a single "
            'one, below `if __name__ == "__main__":`.'
        )
    arguments = {"num_epochs": None, **given, "train_dataset": train_dataset}
    if arguments["num_epochs"] is None and not LIMITS.keys() & arguments:
        arguments.setdefault("max_num_train_steps", updates)
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        proving = _Proving(trainer, arguments, updates, Path(folder))
        rows = tuple(proving.checks(factory))
    return Proof(len(proving.reference), rows, tuple(proving.not_checked()))


class _Carrying(TrainerCallback):
    """Copies what the user's objects keep after each update; or puts one thing back at the start of a run.

    Args:
        outside: finds and keeps it.
        text: what is put back; None to copy.
    """

    takes_part_in_preflight = False

    def __init__(self, outside: Outside, text: str | None = None) -> None:
        self._outside, self._text = outside, text

    @torch.no_grad()
    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if self._text is not None:
            self._outside.put_back(trainer, self._text)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self._text is None:
            self._outside.carry(trainer)


class _Proving:
    """The uninterrupted run, and what is compared with it.

    Args:
        trainer: the trainer, which is not at work.
        arguments: those of `train`.
        updates: how many to train.
        folder: for temporary files.
    """

    def __init__(self, trainer: Trainer, arguments: dict[str, Any], updates: int, folder: Path) -> None:
        self._trainer, self._arguments, self._folder = trainer, arguments, folder
        self._outside = Outside(arguments)
        self._settings: dict[str, Any] = {}
        given = (arguments.get(name) for name in ("num_epochs", "gradient_accumulation_steps"))
        epochs, steps = (each if isinstance(each, int) and each > 0 else None for each in given)
        # Several epochs end, with evaluations, if the run has several.
        self._limit = max(_UPDATES_OF_EPOCH, -(-updates // (epochs or updates))) * (steps or 1)
        self._ignored: set[str] = set()
        self._unsteady: set[str] = set()  # metrics that differ in each run, as times do
        self._causes: list[str] = []  # what a resume loses and had an effect
        self._has_halves = True
        self._fault = ""  # of the very same run, done again
        self._first, began = FirstUpdate(), time.perf_counter()
        self.reference = self._train(updates, self._first, states="whole")
        self._seconds = _SECONDS_OF_CHILD + 20 * (time.perf_counter() - began)
        if not self.reference:
            raise ConfigurationError("The run has no update, so there is nothing to prove. Check the arguments.")
        self._last = self.reference[-1].update

    def checks(self, factory: Any) -> Iterator[Check]:
        """The rows of a proof."""
        checks: dict[str, Callable[[], Check]] = {
            _AGAIN: self._again,
            _RESUMED: self._resumed,
            "no workers": lambda: self._with_workers(0),
            "two workers": lambda: self._with_workers(2),
            "half batches, twice as many": self._in_halves,
            "killed and resumed": lambda: self._killed(factory),
            "two ranks, half batches": lambda: self._on_two_ranks(factory),
        }
        for name, check in checks.items():
            try:
                yield check()._replace(check=name)
            except NotCheckedError as error:
                yield Check(name, NOT_CHECKED, None, str(error))
            except Exception as error:  # other loaders and batches may be impossible, but a resume must not
                verdict = DIFFERENCE if name in (_AGAIN, _RESUMED) else NOT_CHECKED
                yield Check(name, verdict, None, f"it failed with {type(error).__name__}: {error}")

    def _train(
        self,
        last_update: int,
        first: FirstUpdate | None = None,
        *others: TrainerCallback,
        states: str = "",
        state: Any = None,
        cut: int = 1,
        **changes: Any,
    ) -> list[UpdateTrace]:
        """The updates of a run in this process, which leaves nothing behind but, in a folder `states`, its states.

        Args:
            last_update: the run stops after it.
            first: what to complete in the first update.
            others: further callbacks.
            states: a folder for its states.
            state: it begins there.
            cut: into how many parts batches are cut.
            changes: to the arguments of `train`.
        """
        trainer, trace = self._trainer, Trace(last_update, self._outside, first)
        arguments, saving = {**self._arguments, **changes}, [children.Saving(self._folder / states)] if states else []
        watching = [children.ShortEpochs(self._limit * cut), *saving, *others, trace]
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with trained_again(trainer, arguments, state, *watching):
                settings, updates = trainer.run_context.settings, list(trace.updates)
        if not self._settings:  # those of the uninterrupted run, which is the first one
            self._settings = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        return updates

    def _compared(self, updates: list[UpdateTrace], when: str, unknown: str = "") -> Check:
        """The verdict on a run that must have the same bits; `unknown` says what may be wrong if nothing is found."""
        parting = self._parting(updates)
        if parting is None:
            expected, trained = ([each.update for each in run] for run in (self.reference, updates))
            wrong = f"it trained the updates {trained} instead of {expected}" if trained != expected else ""
            return Check("", DIFFERENCE if wrong else SAME, None, wrong)
        one, other = (next(each for each in run if each.update == parting.update) for run in (self.reference, updates))
        texts = self._outside.differing(parting.part, one, other, self._ignored)
        texts = [text for text in texts if text in self._causes] or texts
        found = self._outside.sentences(texts[:_MOST_NAMED], one, other, when)
        reason = "; ".join(found) or self._fault or unknown or _BY_ITSELF.get(parting.part, _CLOCK)
        return Check("", DIFFERENCE, parting.update, f"{PARTS[parting.part]}: {reason}")

    def _parting(self, updates: list[UpdateTrace]) -> Parting | None:
        """Where a run parts from the uninterrupted one."""

        def steady(each: UpdateTrace) -> UpdateTrace:
            return each._replace(metrics={name: each.metrics[name] for name in each.metrics.keys() - self._unsteady})

        return first_parting(map(steady, self.reference), map(steady, updates))

    def _again(self) -> Check:
        updates = self._train(self._last, states="again")
        pairs = zip(self.reference, updates, strict=False)
        self._unsteady = {name for one, other in pairs for name, _ in one.metrics.items() ^ other.metrics.items()}
        check = self._compared(updates, "when it was trained again")
        if check.verdict == DIFFERENCE:
            self._fault = check.culprit.partition(": ")[2]
        else:  # what differs now does no harm
            self._ignored = differing_in(zip(self.reference, updates, strict=True))
        return check

    def _resumed(self) -> Check:
        updates, state = [], self._folder / "whole" / "0"
        for update in range(1, self._last + 1):
            updates += self._train(update, state=state, states="resumed")
            state = self._folder / "resumed" / str(update)
            if self._parting(updates) is not None:
                break
        self._causes = self._with_an_effect(updates)
        self._ignored -= set(self._causes)
        check = self._compared(updates, "after the resume", _UNKNOWN)
        return check._replace(culprit=self._lost(updates)) if check.verdict == SAME else check

    def _with_an_effect(self, resumed: list[UpdateTrace]) -> list[str]:
        """What a resume loses that changes the last of its updates when it is put back."""
        parting = self._parting(resumed)
        if parting is None or parting.update == 1 or self._fault:
            return []
        one, other, before = self.reference[parting.update - 1], resumed[-1], parting.update - 1
        texts = self._outside.differing(parting.part, one, other, self._ignored)
        if len(texts) == 1:
            return texts
        tried = texts or self._outside.differing(parting.part, one, other, ())
        self._train(before, None, _Carrying(self._outside))

        def matters(text: str) -> bool:
            if text not in self._outside.carried:
                return True
            state = self._folder / "resumed" / str(before)
            try:
                changed = self._train(before + 1, None, _Carrying(self._outside, text), state=state)
            except Exception:  # without what belongs to it, it may not work
                return True
            return first_parting([other], changed) is not None

        return [text for text in tried[:_MOST_TRIED] if matters(text)] or texts

    def _lost(self, resumed: list[UpdateTrace]) -> str:
        """What a resume loses without an effect so far."""
        for one, other in zip(reversed(self.reference), reversed(resumed), strict=True):
            names = (one.outside.keys() & other.outside.keys()) - self._ignored
            texts = sorted(name for name in names if one.outside[name] != other.outside[name])
            if texts:
                found = self._outside.sentences(texts[:_MOST_NAMED], one, other, "after the resume")
                return f"without an effect in these updates, a resume loses something: {'; '.join(found)}"
        return ""

    def not_checked(self) -> Iterator[str]:
        """What the rows are not about."""
        context, callbacks = self._trainer.run_context, self._trainer.callback_handler
        left_out = [type(each).__name__ for each in callbacks if each not in taking_part(callbacks)]
        yield f"what happens only after update {self._last}, in epoch {self.reference[-1].epoch} of this rehearsal"
        yield f"epochs with more than {self._limit} batches, where training and evaluation were cut"
        if self._arguments.get("eval_dataset") is None:
            yield "an evaluation: there is no `eval_dataset`"
        if left_out:
            yield f"callbacks that print or write files, without `takes_part_in_preflight`: {', '.join(left_out)}"
        yield f"other devices than {context.accelerator.device.type}, and more than two processes"

    def _with_workers(self, workers: int) -> Check:
        data, given = self._arguments["train_dataset"], self._arguments.get("train_dataloader_kwargs") or {}
        if overrides(self._trainer, "create_train_dataloader"):
            raise NotCheckedError("`create_train_dataloader` is overridden, and makes loaders in its own way")
        rows = data.dataset if isinstance(data, DataLoader) else data
        if isinstance(rows, IterableDataset) or not hasattr(rows, "__getitem__"):
            raise NotCheckedError("the order of a stream depends on its workers")
        alone = {} if workers else {"prefetch_factor": None, "persistent_workers": False}
        changes: dict[str, Any] = {"train_dataloader_kwargs": {**given, **alone, "num_workers": workers}}
        if isinstance(data, DataLoader):
            changes = {"train_dataset": copy.copy(data)}
            prefetched = (data.prefetch_factor or 2) if workers else None
            own = {"num_workers": workers, "prefetch_factor": prefetched, "persistent_workers": False}
            vars(changes["train_dataset"]).update(own)  # torch refuses to set the last one
        unknown = "each worker has its own copy of the dataset, and of the variables that it changes"
        updates = self._train(self._last, states="workers", **changes)  # a save may read rows, too
        return self._compared(updates, f"with {workers} workers", unknown if workers else "")

    def _halved(self) -> dict[str, Any]:
        """The arguments of updates that are cut in two."""
        data, first = self._arguments["train_dataset"], self._first
        size, given = self._settings["per_device_batch_size"], self._arguments.get("train_dataloader_kwargs") or {}
        has_own_sizes = isinstance(data, DataLoader) or not {"batch_size", "batch_sampler"}.isdisjoint(given)
        obstacles = {
            "your own loader decides the size of its batches": has_own_sizes,
            f"a batch of {size} has no halves": size % 2,
            "the forward pass draws random numbers, which depend on the size of batches": first.draws,
            "no gradients were seen before the optimizer's step": first.gradients is None,
            "the halves of a batch are other ones: rows are random, padded, or read as a stream": not self._has_halves,
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                raise NotCheckedError(obstacle)
        return {"per_device_batch_size": size // 2}

    def _in_halves(self) -> Check:
        steps, cut = self._settings["gradient_accumulation_steps"], FirstUpdate()
        (update,) = self._train(1, cut, **self._halved(), cut=2, gradient_accumulation_steps=2 * steps)
        self._has_halves = update.batch == self.reference[0].batch
        self._halved()
        return self._compared_to_rounding(cut)

    def _compared_to_rounding(self, cut: FirstUpdate) -> Check:
        """The verdict on the gradient of a first update that was cut in two."""
        whole, parts = self._first.gradients or {}, cut.gradients or {}
        names = whole.keys() | parts.keys()
        zero = torch.zeros(())
        difference = sum(float((whole.get(name, zero) - parts.get(name, zero)).square().sum()) for name in names)
        distance = (difference / (sum(float(each.square().sum()) for each in whole.values()) or 1)) ** 0.5
        if distance <= self._tolerance:
            return Check("", ROUNDING)
        if self._fault:
            raise NotCheckedError(f"the very same run, done again, differs: {self._fault}")
        if self._first.statistics:
            who = ", ".join(self._first.statistics)
            return Check("", KNOWN, 1, f"batch statistics: {who} normalises each batch by its own mean and variance")
        moved = [text.rstrip(",") for text in self._first.moved if self._outside.moves_with_batches(text)]
        if moved:
            who = ", ".join(moved[:_MOST_NAMED])
            return Check("", KNOWN, 1, f"each batch changes {who}, and there are twice as many")
        hooks = [text for _, text, _ in hooks_of(self._trainer) if "gradient hook" in text]
        if hooks:
            return Check("", KNOWN, 1, f"{', '.join(hooks[:_MOST_NAMED])} gets the gradient of each batch by itself")
        reason = "the loss is no mean over the rows of a batch, or the model relates them to each other"
        return Check("", DIFFERENCE, 1, f"the gradients, by {distance:.1g} of their norm: {reason}")

    @property
    def _tolerance(self) -> float:
        """How far gradients that are equal to rounding may be apart, relative to their norm."""
        parameters = [each for each in self._trainer.get_model().parameters() if each.is_floating_point()]
        epsilon = max((torch.finfo(each.dtype).eps for each in parameters), default=torch.finfo(torch.float32).eps)
        mixed = str(self._trainer.run_context.accelerator.mixed_precision)
        lowest = {"bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-3}.get(mixed, 0)
        of_device = 0 if self._trainer.device.type == "cpu" else 2**-10  # TF32
        return float(max(epsilon, lowest, of_device) ** (2 / 3))

    def _job(self, factory: Any, name: str, last_update: int, killed_in: int | None = None, **settings: Any) -> Job:
        payload = children.payload_of(self._trainer, self._arguments, factory)
        settings = {**self._settings, "resume_from": self._folder / "whole" / "0", **settings}
        return Job(payload, name, self._folder, settings, last_update, self._limit, killed_in)

    def _killed(self, factory: Any) -> Check:
        job = self._job(factory, "killed", self._last, killed_in=self._last // 2 + 1)
        before, _ = children.run_jobs([job], [{"PYTHONHASHSEED": "1"}], self._seconds)
        after: list[UpdateTrace] = []
        if self._parting(before) is None:
            self._ignored |= differing_in(zip(self.reference, before, strict=False)) - set(self._causes)
            job = self._job(factory, "continued", self._last, resume_from=self._folder / "killed")
            after, _ = children.run_jobs([job], [{"PYTHONHASHSEED": "2"}], self._seconds)
            one = self.reference[self._last // 2]  # what was evaluated before it may be in the state
            after[:1] = [each._replace(evaluation=one.evaluation, metrics=one.metrics) for each in after[:1]]
        return self._compared([*before, *after], "in a new process", _ORDER)

    def _on_two_ranks(self, factory: Any) -> Check:
        settings = self._halved()
        jobs = [self._job(factory, f"rank_{rank}", 1, **settings) for rank in range(2)]
        updates, cut = children.run_jobs(jobs, children.two_ranks(), self._seconds)
        if cut.ranks != 2:
            raise NotCheckedError("the factory makes trainers that train alone")
        expected, rows = ((run[0].rows if run else ()) for run in (self.reference, updates))
        if sorted(expected or ()) != sorted(rows or ()):
            raise NotCheckedError(f"the ranks had other rows, which two ranks may share in their own way: {rows}")
        return self._compared_to_rounding(cut)
