"""Trains a few updates of a run in all ways that must give the same, and names what makes them differ."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.looking.rehearsal import QuietLimit, refuse, taking_part
from pytorch_accelerated.extras.proving import children
from pytorch_accelerated.extras.proving.children import Job, NotCheckedError
from pytorch_accelerated.extras.proving.outside import BY_DATA, Outside, differing_in, hooks_of
from pytorch_accelerated.extras.proving.rewind import NOT_TAKEN, trained_again
from pytorch_accelerated.extras.proving.trace import PARTS, FirstUpdate, Parting, Trace, UpdateTrace
from pytorch_accelerated.extras.proving.trace import first_parting as parting_of
from pytorch_accelerated.facts import LIMITS, check_positive_count
from pytorch_accelerated.loop import overrides
from pytorch_accelerated.ranks import is_batch_norm
from pytorch_accelerated.record.text import aligned

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

SAME, ROUNDING, DIFFERENCE = "same bits", "equal to rounding", "difference"
KNOWN, NOT_CHECKED = "known difference", "not checked"
_AGAIN, _RESUMED = "again", "resumed at each update"
# Why a new process differs from its beginning on.
_BY_PROCESS = (
    "it is another one in each process: call `set_seed` before what is random, sort sets and folders, use `hashlib` in "
    "place of `hash`, and look at the factory"
)
# What neither a state nor this process restores, and nobody can name.
_OUTSIDE = "a clock, a file, the environment, a thread, or another source that was not found"
_BY_ITSELF = {
    "batch": f"the rows depend on {_OUTSIDE}",
    "losses": f"the forward pass or the loss depends on {_OUTSIDE}",
    "gradients": "an operation is not deterministic: `torch.use_deterministic_algorithms(True)` names it",
    "settings": f"a callback or the schedule depends on {_OUTSIDE}",
}
_NO_MEAN = "the loss is not a mean over the rows of a batch, or the model relates them to each other"
_BACKWARD = (
    "the loss is the mean of those of its halves; not found: look at the backward pass, such as autograd functions"
)
_NO_GRADIENT = "have no gradient, for which torch waits: freeze before `train`, or give DDP `find_unused_parameters`"
_BY_RANK = (
    "half batches in one process give the same; not found: look at what depends on the rank, or avoids `self.model`"
)
_UNKNOWN = f"it depends on {_OUTSIDE}"
_SECONDS_OF_CHILD = 120
_UPDATES_OF_EPOCH, _MOST_NAMED = 3, 3


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
        rows = [row._replace(culprit=re.sub(r"(?s)\n.*", " (see below)", row.culprit.strip())) for row in self.rows]
        shown = [(f"  {row.check}", row.verdict, str(row.update or ""), row.culprit) for row in rows]
        head = f"{self.updates} updates, trained uninterrupted and in {len(self.rows)} other ways:"
        missing = [f"  not checked: {each}" for each in self.not_checked]
        for row in self.rows:
            more = row.culprit.strip().splitlines()[1:]
            missing += [f"  {row.check}:", *(f"    {line}".rstrip() for line in more)] if more else []
        return "\n".join([head, *aligned([("  ", "verdict", "update", "why"), *shown], [2]), *missing])


def prove(trainer: Trainer, train_dataset: Any, updates: int, factory: Any, given: Mapping[str, Any]) -> Proof:
    """The proof of `Trainer.prove`."""
    check_positive_count("updates", updates)
    refuse(given, NOT_TAKEN, by="prove")
    if trainer.run_context.parts.ranks.count > 1 or children.is_child():
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


class _Proving:
    """The uninterrupted run, and what is compared with it.

    Args:
        trainer: the trainer, which is not at work.
        arguments: the arguments of `train`.
        updates: how many to train.
        folder: for temporary files.
    """

    def __init__(self, trainer: Trainer, arguments: dict[str, Any], updates: int, folder: Path) -> None:
        self._trainer, self._arguments, self._folder = trainer, arguments, folder
        self._outside = Outside(arguments)
        self._settings: dict[str, Any] = {}
        given = (arguments.get(name) for name in ("num_epochs", "gradient_accumulation_steps"))
        epochs, steps = (each if isinstance(each, int) and each > 0 else None for each in given)
        # Multiple epochs end, with evaluations, if the run has several.
        self._limit = max(_UPDATES_OF_EPOCH, -(-updates // (epochs or updates))) * (steps or 1)
        self._ignored: set[str] = set()
        self._found: dict[str, str] = {}  # by the part of an update, why it differed in an earlier check
        self._unsteady: set[str] = set()  # metrics that differ in each run, as times do
        self._fault = ""  # of the very same run, done again
        self._has_halves, self._halves = True, Check("", NOT_CHECKED)
        began = time.perf_counter()
        self.reference = self._train(updates, states="whole")
        self._seconds = _SECONDS_OF_CHILD + 20 * (time.perf_counter() - began)
        if not self.reference:
            raise ConfigurationError("The run has no update, so there is nothing to prove. Check the arguments.")
        self._first, self._last = _first_of(self.reference), self.reference[-1].update

    def checks(self, factory: Any) -> Iterator[Check]:
        """The rows of a proof."""
        checks: dict[str, Callable[[], Check]] = {
            _AGAIN: self._again,
            _RESUMED: self._resumed,
            "no workers": lambda: self._with_workers(0),
            "two workers": lambda: self._with_workers(2),
            "half batches, twice as many": self._in_halves,
            "killed and resumed": lambda: self._killed(factory),
            "two ranks" if self._has_lanes else "two ranks, half batches": lambda: self._on_two_ranks(factory),
        }
        for name, check in checks.items():
            try:
                yield check()._replace(check=name)
            except NotCheckedError as error:
                yield Check(name, NOT_CHECKED, None, str(error))
            except Exception as error:  # other loaders and batches may be impossible, but a resume must not
                verdict = DIFFERENCE if name in (_AGAIN, _RESUMED) else NOT_CHECKED
                yield Check(name, verdict, None, f"it failed with {type(error).__name__}: {error}")

    def _train(self, last_update: int, *, states: str = "", state: Any = None, **changes: Any) -> list[UpdateTrace]:
        """The updates of a run in this process, which leaves nothing behind but, in a folder `states`, its states.

        Args:
            last_update: the run stops after it.
            states: a folder for its states.
            state: it begins there.
            changes: to the arguments of `train`.
        """
        trainer, trace = self._trainer, Trace(self._outside)
        arguments, saving = {**self._arguments, **changes}, [children.Saving(self._folder / states)] if states else []
        limit = self._limit * (2 if "per_device_batch_size" in changes else 1)
        watching = [QuietLimit(limit), *saving, trace]
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with trained_again(trainer, arguments, state, *watching, until=last_update):
                settings, updates = trainer.run_context.asked.settings, list(trace.updates)
        if not self._settings:  # the uninterrupted run comes first, and sets them
            self._settings = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        return updates

    def _compared(self, updates: list[UpdateTrace], when: str, remedy: str = "", unknown: str = "") -> Check:
        """The verdict on a run that must have the same bits.

        Args:
            updates: of the run.
            when: see `Outside.sentence`.
            remedy: what to do about what is found; default: by what it is.
            unknown: what may be wrong if nothing is found.
        """
        parting = self._parting(updates)
        if parting is None:
            expected, trained = ([each.update for each in run] for run in (self.reference, updates))
            wrong = f"it trained the updates {trained} instead of {expected}" if trained != expected else ""
            return Check("", DIFFERENCE if wrong else SAME, None, wrong)
        one, other = (next(each for each in run if each.update == parting.update) for run in (self.reference, updates))
        texts = self._outside.differing(parting.part, one, other, self._ignored)
        if not texts and unknown == _UNKNOWN and not self._fault:  # what differs in each run may act, too
            texts = self._outside.differing(parting.part, one, other, ())
            self._ignored -= set(texts)
        found = "; ".join(self._outside.sentence(each, one, other, when, remedy) for each in texts[:_MOST_NAMED])
        if found:
            self._found.setdefault(parting.part, found)
        # What a resume loses may have been replaced since, and look the same again: an earlier check has seen it.
        known = self._found.get(parting.part) or _BY_ITSELF.get(parting.part, _UNKNOWN)
        reason = found or self._fault or remedy or unknown or known
        return Check("", DIFFERENCE, parting.update, f"{PARTS[parting.part]}: {reason}")

    def _parting(self, updates: list[UpdateTrace], other: list[UpdateTrace] | None = None) -> Parting | None:
        """Where a run parts from the uninterrupted one, or another."""

        def steady(each: UpdateTrace) -> UpdateTrace:
            return each._replace(metrics={name: each.metrics[name] for name in each.metrics.keys() - self._unsteady})

        return parting_of(map(steady, other or self.reference), map(steady, updates))

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
        check = self._compared(updates, "after the resume", unknown=_UNKNOWN)
        return check._replace(culprit=self._lost(updates)) if check.verdict == SAME else check

    def _lost(self, resumed: list[UpdateTrace]) -> str:
        """What a resume loses without an effect so far."""
        for one, other in zip(reversed(self.reference), reversed(resumed), strict=True):
            names = (one.outside.keys() & other.outside.keys()) - self._ignored
            differing = sorted(name for name in names if one.outside[name] != other.outside[name])
            stores = {name for each in (one, other) for name, shown in each.outside.items() if shown.startswith("a ")}
            texts = [text for text in differing if text not in stores]  # which may be filled again
            if texts:
                found = [self._outside.sentence(each, one, other, "after the resume") for each in texts[:_MOST_NAMED]]
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
        yield f"other devices than {context.parts.accelerator.device.type}, and more than two processes"

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
        unknown = "each worker has a number, and its own copy of the dataset and of the variables that it changes"
        updates = self._train(self._last, states="workers", **changes)  # a save may read rows, too
        return self._compared(updates, f"with {workers} workers", unknown=unknown if workers else "")

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
            "the halves of a batch have other rows: they are random, padded, or read as a stream": not self._has_halves,
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                raise NotCheckedError(obstacle)
        return {"per_device_batch_size": size // 2}

    def _in_halves(self) -> Check:
        steps = 2 * self._settings["gradient_accumulation_steps"]
        update = self._train(1, **self._halved(), gradient_accumulation_steps=steps)[0]
        self._has_halves = update.batch == self.reference[0].batch
        self._halved()
        self._halves = self._compared_to_rounding(update, functools.partial(self._why_halves_differ, update))
        return self._halves

    def _distance(self, update: UpdateTrace) -> float:
        """How far the gradient of a first update that was cut in two is from that of the whole, relative to it."""
        whole, parts = self._first.gradients or {}, _first_of([update]).gradients or {}
        zero = torch.zeros(())
        pairs = [(whole.get(name, zero), parts.get(name, zero)) for name in whole.keys() | parts.keys()]
        difference = sum(float((one - other).square().sum()) for one, other in pairs)
        return float((difference / (sum(float(one.square().sum()) for one, _ in pairs) or 1)) ** 0.5)

    def _compared_to_rounding(self, update: UpdateTrace, why: Callable[[], str]) -> Check:
        """The verdict on the gradient of a first update that was cut in two; `why` explains a large distance."""
        distance = self._distance(update)
        if distance <= self._tolerance:
            return Check("", ROUNDING)
        if self._fault:
            raise NotCheckedError(f"the very same run, done again, differs: {self._fault}")
        modules = self._trainer.get_model().named_modules()
        if names := [name for name, each in modules if is_batch_norm(each) and each.training]:
            who = ", ".join(names)
            return Check("", KNOWN, 1, f"batch statistics: {who} normalises each batch by its own mean and variance")
        if moved := [text for text in self._first.moved if self._outside.place(text).role not in BY_DATA]:
            raise NotCheckedError(f"each batch changes {_named(moved)}, and there are twice as many")
        if hooks := [text for _, text, _ in hooks_of(self._trainer) if "gradient hook" in text]:
            raise NotCheckedError(f"{_named(hooks)} gets the gradient of each batch by itself")
        return Check("", DIFFERENCE, 1, f"the gradients, by {distance:.1g} of their norm: {why()}")

    def _why_halves_differ(self, update: UpdateTrace) -> str:
        whole, halves = (sum(map(float, each.losses)) / len(each.losses) for each in (self.reference[0], update))
        if abs(whole - halves) <= self._tolerance * abs(whole):
            return _BACKWARD
        return f"{_NO_MEAN}: it is {whole:.3g}, and that of its halves {halves:.3g} on average"

    @property
    def _tolerance(self) -> float:
        """How far gradients that are equal to rounding may be apart, relative to their norm."""
        parameters = [each for each in self._trainer.get_model().parameters() if each.is_floating_point()]
        epsilon = max((torch.finfo(each.dtype).eps for each in parameters), default=torch.finfo(torch.float32).eps)
        mixed = str(self._trainer.run_context.parts.accelerator.mixed_precision)
        lowest = {"bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-3}.get(mixed, 0)
        of_device = 0 if self._trainer.device.type == "cpu" else 2**-10  # TF32
        return float(max(epsilon, lowest, of_device) ** (2 / 3))

    def _job(self, factory: Any, name: str, last_update: int, killed_in: int | None = None, **settings: Any) -> Job:
        settings = {**self._settings, "resume_from": self._folder / "whole" / "0", **settings}
        limits: dict[str, Any] = {"last_update": last_update, "num_batches": self._limit, "killed_in": killed_in}
        task = functools.partial(children.trace, settings=settings, **limits)
        return Job(children.payload_of(self._trainer, self._arguments, factory, task), name, self._folder)

    def _killed(self, factory: Any) -> Check:
        """Killed within an epoch and at its end, and resumed in a new process each time."""
        pairs = list(itertools.pairwise(self.reference))
        ends = [one.update for one, after in pairs if one.epoch < after.epoch][-1:]
        within = [
            one.update for one, after in pairs if one.epoch == after.epoch and one.update < min([*ends, self._last])
        ]
        updates: list[UpdateTrace] = []
        remedy, state = "", self._folder / "whole" / "0"
        for number, cut in enumerate([*([update + 1 for update in (*within[-1:], *ends)] or [1]), None]):
            job = self._job(factory, f"life_{number}", self._last, killed_in=cut, resume_from=state)
            [trained] = children.run_jobs([job], [{"PYTHONHASHSEED": str(number + 1)}], self._seconds)
            if updates:  # what was evaluated before the first one may be in the state
                one = self.reference[len(updates)]
                trained[:1] = [each._replace(evaluation=one.evaluation, metrics=one.metrics) for each in trained[:1]]
            elif self._parting(trained) is None:
                self._ignored |= differing_in(zip(self.reference, trained, strict=False))
            elif not self._fault:
                remedy = _BY_PROCESS
            updates, state = updates + trained, self._folder / job.name
            if self._parting(updates) is not None:
                break
        return self._compared(updates, "in a new process", remedy)

    @property
    def _has_lanes(self) -> bool:
        return self._trainer.run_context.asked.given.lanes is not None

    def _on_two_ranks(self, factory: Any) -> Check:
        settings, last = ({}, self._last) if self._has_lanes else (self._halved(), 1)
        jobs = [self._job(factory, f"rank_{rank}", last, **settings) for rank in range(2)]
        updates, _ = children.run_jobs(jobs, children.two_ranks(), self._seconds)
        if _first_of(updates).ranks != 2:
            raise NotCheckedError("the factory makes trainers that train alone")
        expected, rows = ((run[0].rows if run else ()) for run in (self.reference, updates))
        if sorted(expected or ()) != sorted(rows or ()):
            raise NotCheckedError(f"the ranks had other rows, which two ranks may share in their own way: {rows}")
        if self._has_lanes:  # to the bit, but for what the first rank sees of its own lanes
            own = ("batch", "contents", "generators", "losses", "outside", "evaluation")
            pairs = zip(self.reference, updates, strict=False)
            seen = [each._replace(**{name: getattr(one, name) for name in own}) for one, each in pairs]
            return self._compared(seen, "on two ranks", unknown="look at what depends on the rank")
        return self._compared_to_rounding(updates[0], self._why_ranks_differ)

    def _why_ranks_differ(self) -> str:
        if self._halves.verdict != ROUNDING:
            return self._halves.culprit.rpartition("of their norm: ")[2]
        trained, seen = self._trainer.get_model().named_parameters(), self._first.gradients or {}
        missing = [name for name, each in trained if each.requires_grad and name not in seen]
        return f"{_named(missing)} {_NO_GRADIENT}" if missing else _BY_RANK


def _first_of(updates: list[UpdateTrace]) -> FirstUpdate:
    return updates[0].first or FirstUpdate(1)


def _named(texts: list[str]) -> str:
    return ", ".join(text.rstrip(",") for text in texts[:_MOST_NAMED])
