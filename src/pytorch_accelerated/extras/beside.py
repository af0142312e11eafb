"""Evaluation next to a run: another process evaluates its training states, and the run enters the values.

The folder of the states is all that the two share. The result of a state is a file in the folder ``evaluations`` next
to it, named after the content of the state, so that it never counts for another one of the same name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.record import Pace, warn_user
from pytorch_accelerated.states import FolderLock, disk
from pytorch_accelerated.states.layout import identity_of
from pytorch_accelerated.states.publish import write_whole
from pytorch_accelerated.states.verify import list_states, read_manifest

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

_SECONDS_BETWEEN_LOOKS = 1.0
# Training has no such names of losses, and can save averaged models only as they are at the moment.
_LEFT_OUT = ("evaluation_", "ema_model_", "swa_model_")


class EvaluateBesideCallback(TrainerCallback):
    """Enters the values of `Trainer.evaluate_states`, which evaluates the states of this run in another process.

    The values have the names of an evaluation at the end of an epoch, such as ``eval_loss_epoch``, and the epoch and
    the update of their state. What judges a value does so when it is entered: `EarlyStoppingCallback` stops the run
    then, and `SaveBestModelCallback` saves the model of the state. The run looks for values about once a second, and
    after each epoch. At its end it waits for the states that are not evaluated yet, unless a signal ends it.

    >>> callbacks = [..., EvaluateBesideCallback("states")]

    Args:
        states_folder: the folder that a `SaveTrainingStateCallback` saves to.
        max_wait_seconds: how long the run waits at its end, before it warns about the states without a value.
    """

    ranks_agree_after_each_update = False
    takes_part_in_preflight = False

    def __init__(self, states_folder: str | Path = "training_states", max_wait_seconds: float = 3600.0) -> None:
        self.states_folder = self._absolute(states_folder)
        self.max_wait_seconds = max_wait_seconds
        self._entered = 0  # updates of the last state with a value
        self._done: set[str] = set()  # states that have their value, or belong to other runs

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Enter what was evaluated while the run was interrupted.

        Raises:
            ConfigurationError: if the run evaluates itself, or has an optimizer with modes.
        """
        context = trainer.run_context
        if context.parts.loaders.eval is not None or context.parts.mode.has_modes:
            raise ConfigurationError(
                "EvaluateBesideCallback enters values by the names of evaluations in the run, and states of optimizers "
                "with modes have other weights than evaluations. Leave `eval_dataset` out of `train`, or the callback."
            )
        trainer.run_history.is_evaluated_beside = True
        self._entered = min(self._entered, context.parts.state.updates)  # 0 in a new run
        self._pace = Pace(_SECONDS_BETWEEN_LOOKS, updates=context.parts.state.updates)
        self._done |= context.parts.ranks.do_on_first(lambda: self._later_than(context.asked.resumed_from))
        self.on_training_run_epoch_end(trainer)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Enter new values if it is time to look for them."""
        updates = trainer.run_state.updates
        if self._pace.is_due(updates):
            self._pace.go_on(updates, trainer.run_context.parts.ranks.from_first(self._pace.proposal(updates)))
            self.on_training_run_epoch_end(trainer)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Enter new values."""
        context, history = trainer.run_context, trainer.run_history
        for identity, state, result in context.parts.ranks.do_on_first(self._new_results):
            self._done.add(identity)
            if result["updates"] <= self._entered:
                continue  # `final` often has the model of the last epoch
            self._entered = result["updates"]
            update = history.updates_done - context.parts.state.updates + self._entered
            with history.measuring_at(context.asked.epochs_before + result["epochs"], update):
                for name, value in result["metrics"].items():
                    history.update_metric(name, value)
                for judge in trainer.callback_handler:
                    if hasattr(judge, "judge_state") and judge.watch_metric in result["metrics"]:
                        context.control.emitter.call(judge.judge_state, trainer, state)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Wait for the states that are not evaluated yet, then tell the other process that the run is over."""
        context, ranks, folder = trainer.run_context, trainer.run_context.parts.ranks, self.states_folder
        deadline = time.monotonic() + self.max_wait_seconds
        # A signal is urgent.
        while not ranks.any(bool(context.control.stopping.signals.number)):
            self.on_training_run_epoch_end(trainer)
            missing, is_late = ranks.do_on_first(lambda: (self._missing(), time.monotonic() > deadline))
            if is_late and missing:
                warn_user(ranks, f"Nothing has evaluated {missing} in {folder}. Let `evaluate_states` do it.")
            if is_late or not missing:
                ranks.do_on_first(lambda: _write(_path(folder, next(reversed(_states(folder)), ""), "over"), {}))
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def state_dict(self) -> dict[str, Any]:
        """Which states have their value, or belong to other runs."""
        return {"entered": self._entered, "done": sorted(self._done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._entered, self._done = state["entered"], set(state["done"])

    def _later_than(self, state: Path | None) -> set[str]:
        """What is in the folder and later than the state that the run begins with. The run is not over any more."""
        for mark in _path(self.states_folder, "*").parent.glob("*.over"):
            disk.remove(mark)
        serial = -1 if state is None else read_manifest(state).serial
        there = _states(self.states_folder).keys() | _evaluated(self.states_folder)
        return {identity for identity in there if _serial(identity) > serial}

    def _missing(self) -> list[str]:
        """The names of the states that have no value yet."""
        states = [state for each, state in _states(self.states_folder).items() if each not in self._done]
        return [path.name for path, facts in states if facts["updates"] > self._entered]

    def _new_results(self) -> list[tuple[str, Path, dict[str, Any]]]:
        """Identity, folder and result of the states that have been evaluated since the last call, oldest first.

        With multiple evaluators, a state may be ready before an older one, for which it waits.
        """
        evaluated = _evaluated(self.states_folder)
        places = _states(self.states_folder) if evaluated - self._done else {}
        waiting = [_serial(each) for each in places if each not in evaluated | self._done]
        new = [each for each in evaluated - self._done if _serial(each) < min(waiting, default=math.inf)]
        results = [(each, json.loads(_path(self.states_folder, each).read_bytes())) for each in new]
        # A state may be gone, and another have its name.
        found = [(each, places.get(each, (self.states_folder / each,))[0], result) for each, result in results]
        return sorted(found, key=lambda one: one[2]["updates"])


def _states(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The states in a folder and their facts by identity, oldest first."""
    return {identity_of(manifest): (path, manifest.facts) for path, manifest in list_states(folder)}


def _evaluated(folder: Path) -> set[str]:
    """The identities of the states that were evaluated."""
    return {path.stem for path in _path(folder, "*").parent.glob("*.json")}


def _serial(identity: str) -> int:
    return int(identity.partition("-")[0])


def _path(folder: Path, identity: str, kind: str = "json") -> Path:
    return folder / "evaluations" / f"{identity}.{kind}"


def _write(path: Path, result: dict[str, Any]) -> None:
    write_whole(path, [json.dumps(result, indent=1).encode()])


def evaluate_states(trainer: Trainer, folder: Path, *, follow: bool, **arguments: Any) -> None:
    """See `Trainer.evaluate_states`; `arguments` are the arguments of `evaluate`."""
    while True:
        with contextlib.ExitStack() as claims:
            find = functools.partial(_next_state, folder, claims)
            identity, state, is_over = trainer.run_context.parts.ranks.do_on_first(find)
            if state is not None:
                _evaluate(trainer, state, identity, arguments)
                continue
        if is_over or not follow:
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _next_state(folder: Path, claims: contextlib.ExitStack) -> tuple[str, Path | None, bool]:
    """Identity and folder of the oldest state that nobody has evaluated or claimed, which is claimed then.

    If there is none, the third value says whether the run is over, and all are evaluated.
    """
    identity, is_shared = "", False
    for identity, (path, _) in _states(folder).items():
        if identity in _evaluated(folder):
            continue
        try:
            lock = FolderLock(folder / "evaluations", name=f"{identity}.lock")
            lock.acquire()
        except CheckpointError as error:
            if error.__cause__ is not None:  # the disk
                raise
            is_shared = True
            continue
        claims.callback(lock.release)
        if identity not in _evaluated(folder):  # nobody was faster
            return identity, path, False
    return identity, None, not is_shared and _path(folder, identity, "over").exists()


def _evaluate(trainer: Trainer, state: Path, identity: str, arguments: dict[str, Any]) -> None:
    """Write the metrics of a state, unless the run has deleted or replaced it."""
    context, failure = trainer.run_context, None
    try:
        context.control.states.load(state, restores_position=False)
    except InvalidCheckpointError as error:
        failure = error
    _, facts = context.parts.ranks.do_on_first(lambda: _states(state.parent).get(identity, (state, None)))
    if facts is None:
        return
    if failure is not None:
        raise failure
    values = {name: each for name, each in trainer.evaluate(**arguments).items() if isinstance(each, float)}
    metrics = {name: float(each) for name, each in values.items() if not name.startswith(_LEFT_OUT)}
    epochs = facts["epochs"] + (facts["samples_in_epoch"] > 0)
    result = {"state": state.name, "updates": facts["updates"], "epochs": epochs, "metrics": metrics}
    trainer.run_context.parts.ranks.do_on_first(lambda: _write(_path(state.parent, identity), result))
