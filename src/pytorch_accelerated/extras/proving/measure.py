"""Adds a quantity to the history of a finished run, as if it had been logged while the run trained.

The run is trained again in windows, each from the nearest state before what is to be measured, in as many processes as
asked. Its states and records stay as they are: what was measured is in a file of its own next to the states, and
`read_run_history` adds it to the rest. A window that doesn't give what the run has recorded is an error.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.looking.rehearsal import arguments_of_last_run, refuse
from pytorch_accelerated.extras.proving import children
from pytorch_accelerated.extras.proving.diff import Records, records_of, weights_in
from pytorch_accelerated.extras.proving.rewind import NOT_TAKEN, nearest_state, refuse_shorter, states_in, trained_again
from pytorch_accelerated.extras.proving.trace import digest, weights_of
from pytorch_accelerated.facts import check_positive_count
from pytorch_accelerated.ranks import held_parts, kept
from pytorch_accelerated.states import MEASURED_FILE, FolderLock
from pytorch_accelerated.states.publish import write_whole
from pytorch_accelerated.states.verify import looks_like_state
from pytorch_accelerated.tracking import MetricRecord
from pytorch_accelerated.utils import read_run_history

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.tracking import RunHistory

Found = dict[int, tuple[int, dict[str, float]]]  # epoch and values, by update

EVENTS = ("on_optimizer_step_end", "on_optimizer_step_start")
_FORMAT = 1


class Quantity(NamedTuple):
    """What is measured.

    Attributes:
        function: gets the trainer, and returns a number, or numbers by name.
        name: of a single number.
        event: when it is called, one of `EVENTS`.
    """

    function: Callable[[Any], Any]
    name: str
    event: str


class Window(NamedTuple):
    """Updates that are trained again without a break.

    Attributes:
        start: the updates before the first of them.
        state: the training state after these; None for the beginning of the run.
        updates: those at which something is measured.
        until: the last one, where the run has recorded a loss that what is measured has an effect on, or its end.
    """

    start: int
    state: Path | None
    updates: list[int]
    until: int


class Recorded(NamedTuple):
    """What a run has recorded, which training again must give.

    Attributes:
        steps: the values of its step records.
        every: the updates between two of them; None if their number grew.
        names: of its metrics.
        weights: digests of the weights in the states after its last update, if they are needed, by that update.
    """

    steps: Records
    every: int | None
    names: set[str]
    weights: dict[int, list[str]]


def measure(
    trainer: Trainer,
    states: str | Path,
    quantity: Quantity,
    *,
    every: int | None,
    updates: Collection[int] | None,
    processes: int,
    factory: Any,
    given: Mapping[str, Any],
) -> RunHistory:
    """See `Trainer.measure`."""
    refuse(given, NOT_TAKEN, by="measure")
    check_positive_count("processes", processes)
    place, ranks, is_here = Path(states), trainer.run_context.parts.ranks, factory is None and processes == 1
    if not callable(quantity.function) or quantity.event not in EVENTS:
        raise ConfigurationError(
            f"`measure` got the function {quantity.function!r} and the event {quantity.event!r}. It takes a function "
            f"of the trainer, and one of the events {' and '.join(EVENTS)}."
        )
    if factory is not None and given:
        raise ConfigurationError("`measure` got arguments of `train`, which its `factory` returns. Leave them out.")
    if not is_here and (ranks.count > 1 or children.is_child()):
        raise ConfigurationError(
            "`measure` was called in one of several processes, but it starts those that it needs. Call it in a single "
            'one, below `if __name__ == "__main__":`; or on all ranks, without `processes` and `factory`.'
        )
    arguments = {} if factory is not None else dict(given) or arguments_of_last_run(trainer)
    recorded, shares = ranks.do_on_first(lambda: _plan(place, every, updates, processes, quantity.event))
    if factory is None:
        nearest_state(trainer, place, shares[0][0].updates[0])  # the beginning may be out of reach
    tasks = [functools.partial(_measured, quantity=quantity, recorded=recorded, windows=each) for each in shares]
    found = tasks[0](None, trainer, arguments) if is_here else _by_children(trainer, arguments, factory, tasks)
    return ranks.do_on_first(lambda: _written(place, found, quantity.event))


def _plan(
    place: Path, every: int | None, updates: Collection[int] | None, processes: int, event: str
) -> tuple[Recorded, list[list[Window]]]:
    """What the run has recorded, and the windows of each process."""
    history = read_run_history(place)  # first, because it says what is missing
    if looks_like_state(place):
        raise ConfigurationError(f"{place} is a single training state. Give the folder of the run's states.")
    found = [(facts["updates"], folder) for folder, facts in states_in(place)]
    last = found[-1][0]
    if every is not None:
        check_positive_count("every", every)
    wanted = range(every or 1, last + 1, every or 1) if updates is None else updates
    chosen = set(wanted) if isinstance(wanted, Iterable) else {wanted}
    if (every is not None and updates is not None) or not chosen or not chosen <= set(range(1, last + 1)):
        raise ConfigurationError(
            f"`measure` got `every` {every!r} and `updates` {updates!r}, but the newest state in {place} is after "
            f"update {last}. Give one of them: a distance, or numbers from 1 to {last}."
        )
    if history.updates_done != last:
        raise ConfigurationError(
            f"The history in {place} continues that of an earlier run, so its updates have other numbers. Only runs "
            "that began with an empty history can be measured."
        )
    steps = {each: values for each, values in records_of(history).items() if each[0] == "step"}
    gaps = [end - start for _, start, end in steps]
    ends = {end for _, _, end in steps}
    # What an update has done to the weights shows in the loss of the next one; after the last, in what was saved.
    later = int(event == "on_optimizer_step_end")
    needed = last not in ends or bool(later and last in chosen)
    newest = {last: [digest(weights_in(folder)) for at, folder in found if at == last]} if needed else {}
    names = {each.name for each in history.records} - history.names_measured_afterwards
    recorded = Recorded(steps, gaps[0] if gaps and gaps[0] == max(gaps) else None, names, newest)
    starts: dict[int, Path | None] = {0: None, **{start: folder for start, folder in found if start < last}}
    return recorded, _shares(sorted(chosen), starts, sorted({last} | ends), processes, later)


def _shares(
    updates: list[int], states: Mapping[int, Path | None], ends: list[int], processes: int, later: int
) -> list[list[Window]]:
    """The windows of each process, about equally long together.

    Args:
        updates: what is measured.
        states: by their updates.
        ends: the updates up to which a window can be checked.
        processes: how many, at most.
        later: how many updates later a mistake in one shows.
    """
    by_start: dict[int, list[int]] = {}
    for update in updates:
        by_start.setdefault(max(start for start in states if start < update), []).append(update)
    windows = [
        Window(start, states[start], own, next(end for end in ends if end >= min(own[-1] + later, ends[-1])))
        for start, own in by_start.items()
    ]
    lengths = [each.until - each.start for each in windows]
    shares: list[list[Window]] = [[] for _ in range(processes)]
    for window, length, end in zip(windows, lengths, itertools.accumulate(lengths), strict=True):
        own = shares[int((end - length / 2) * processes / sum(lengths))]
        if own and own[-1].until >= window.start:  # the process is there already
            before = own.pop()
            window = Window(before.start, before.state, before.updates + window.updates, window.until)
        own.append(window)
    return [each for each in shares if each]


def _measured(
    job: Any,
    trainer: Trainer,
    given: Mapping[str, Any],
    *,
    quantity: Quantity,
    recorded: Recorded,
    windows: list[Window],
) -> Found:
    """What is found in some windows, here or in a child."""
    found: Found = {}
    if recorded.every is not None:
        given = {**given, "record_every_n_steps": recorded.every}
    with kept() as before:
        before.object(trainer)
        vars(trainer)["print"] = lambda *args, **kwargs: None  # each window would say where it resumes
        for window in windows:
            look, state = _Look(quantity, window, recorded.names), window.state
            with trained_again(trainer, given, state, look, until=window.until, rolls_back=state is not None):
                refuse_shorter(trainer, window.until)
                _check(window, recorded, records_of(trainer.run_history), look.weights)
                found |= look.found
    return found


def _check(window: Window, recorded: Recorded, again: Records, weights: str) -> None:
    """Refuse a window that has not given what the run has recorded."""
    for place, values in recorded.steps.items():
        if window.start < place[-1] <= window.until:
            for name, value in values.items():
                other = again.get(place, {}).get(name)
                if repr(value) != repr(other):
                    raise _changed(f"{name} {value!r} in updates {place[1] + 1} to {place[2]}", f"{other!r}")
    if weights and weights not in recorded.weights.get(window.until, [weights]):
        raise _changed(f"weights after update {window.until}", "others")


def _changed(recorded: str, again: str) -> ConfigurationError:
    return ConfigurationError(
        f"The run has recorded {recorded}, and training it again gives {again}, so nothing was measured. Its code, its "
        "data, or what it ran on (ranks, device, versions) has changed since, or it doesn't resume exactly. `diff` and "
        "`prove` say more."
    )


class _Look(TrainerCallback):
    """Measures in a window.

    Attributes:
        found: what was measured.
        weights: a digest of the weights after the last update; empty if what was saved can't be compared.
    """

    def __init__(self, quantity: Quantity, window: Window, taken: set[str]) -> None:
        self._quantity, self._updates, self._until, self._taken = quantity, set(window.updates), window.until, taken
        self.found: Found = {}
        self.weights = ""

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Measure before the update is applied."""
        self._look(trainer, "on_optimizer_step_start", trainer.run_state.updates + 1)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Measure after the update."""
        self._look(trainer, "on_optimizer_step_end", trainer.run_state.updates)
        # A schedule-free optimizer trains with other weights than those that the run has saved at its end.
        if trainer.run_state.updates == self._until and not hasattr(trainer.optimizer, "eval"):
            self.weights = digest(weights_of(trainer))

    def _look(self, trainer: Trainer, event: str, update: int) -> None:
        if event != self._quantity.event or update not in self._updates:
            return
        with kept() as before:
            before.generators()
            for part in (trainer.get_model(), trainer.loss_func, *held_parts(trainer.run_context.holder).values()):
                if isinstance(part, nn.Module):
                    before.module(part)
            result = self._quantity.function(trainer)
        values = result if isinstance(result, Mapping) else {self._quantity.name: result}
        try:
            plain = {str(name): value.item() if hasattr(value, "item") else value for name, value in values.items()}
            numbers = {name: float(value) for name, value in plain.items()}
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"`measure` takes a number, or numbers by name, but got {result!r}.") from error
        if not self._taken.isdisjoint(numbers):
            names = ", ".join(sorted(self._taken & numbers.keys()))
            raise ConfigurationError(f"The run itself has recorded {names}. Give another `name`.")
        self.found[update] = trainer.run_history.current_epoch, numbers


def _by_children(
    trainer: Trainer, arguments: Mapping[str, Any], factory: Any, tasks: Iterable[Callable[..., Found]]
) -> Found:
    """What the tasks find, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        try:
            payloads = [children.payload_of(trainer, arguments, factory, task) for task in tasks]
            jobs = [children.Job(each, f"part_{number}", Path(folder)) for number, each in enumerate(payloads)]
            results = children.run_jobs(jobs, [{}] * len(jobs))
        except children.NotCheckedError as error:
            raise ConfigurationError(f"`measure` failed in another process: {error}") from error
    return {update: values for result in results for update, values in result.items()}


def _written(place: Path, found: Found, event: str) -> RunHistory:
    """The history of the run with what was found, which is written."""
    metrics: dict[str, Any] = {}
    for update, (epoch, values) in found.items():
        for name, value in values.items():
            metric = metrics.setdefault(name, {"event": event, "records": []})
            metric["records"].append([epoch, update, value])
    file, lock = place / MEASURED_FILE, FolderLock(place, "states", name=f"{MEASURED_FILE}.lock")
    lock.acquire()
    try:
        metrics = {**(_metrics_in(file) if file.exists() else {}), **metrics}
        write_whole(file, [json.dumps({"format": _FORMAT, "metrics": metrics}).encode()])
    finally:
        lock.release()
    return read_run_history(place)


def add_measured(history: RunHistory, file: Path) -> None:
    """Add what was measured to the history of its run, where it would stand if it had been logged."""
    records, metrics = list(history.records), _metrics_in(file)
    for name, metric in metrics.items():
        records += [MetricRecord(name, value, epoch, update) for epoch, update, value in metric["records"]]
    records.sort(key=lambda record: record.update)
    history.load_state_dict({**history.state_dict(), "records": records})
    history.names_measured_afterwards.update(metrics)


def _metrics_in(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes())
    if content["format"] != _FORMAT:
        raise ConfigurationError(f"{file} has format {content['format']!r}, which a newer version may read.")
    return dict(content["metrics"])
