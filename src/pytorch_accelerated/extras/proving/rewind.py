"""Goes back to any update of a run that saved training states: the one way in which a run is trained again.

Order and randomness are functions of seed, epoch and position, so the nearest training state before the update, and
training from there on, give the very update of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, StopTrainingError
from pytorch_accelerated.extras.looking.rehearsal import arguments_of_last_run, refuse, rehearsal, taking_part
from pytorch_accelerated.extras.proving.outside import Outside
from pytorch_accelerated.ranks import kept
from pytorch_accelerated.states.verify import list_states, looks_like_state, read_manifest

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

NOT_TAKEN = ("resume_from", "max_duration", "record_every_n_steps")


@contextlib.contextmanager
def rewind(
    trainer: Trainer, states: str | Path, update: int, *callbacks: TrainerCallback, **train_arguments: Any
) -> Iterator[Path | None]:
    """In the block, a run that saved training states is at one of its updates again; afterwards all is as before.

    Trains from the nearest state before the update, or from the beginning of the run if the trainer is new, up to the
    end of the update. Weights and buffers are those of the run to the bit, if it resumes exactly, and `run_history` has
    the loss of each update on the way there. Nothing is written: callbacks of the trainer that print or write files are
    left out. Must be entered by all ranks.

    ::

        with rewind(trainer, "states", 4000, **train_arguments):
            print(trainer.evaluate(other_dataset))  # of the model after update 4,000

    Args:
        trainer: the trainer, which is not at work.
        states: the folder of the run's training states, or one of them.
        update: the number of the update, from 1.
        callbacks: see every event on the way there, after the callbacks of the trainer.
        train_arguments: the arguments of `train`; default: as in the trainer's last `train`.

    Yields:
        The state that it began with; None for the beginning of the run.

    Raises:
        ConfigurationError: if no state is from before the update, or the run does not have that many updates.
    """
    refuse(train_arguments, NOT_TAKEN, by="rewind")
    arguments = {**(train_arguments or arguments_of_last_run(trainer)), "record_every_n_steps": 1}
    state = nearest_state(trainer, states, update)
    with trained_again(trainer, arguments, state, *callbacks, until=update, rolls_back=state is not None):
        refuse_shorter(trainer, update)
        yield state


@contextlib.contextmanager
def trained_again(
    trainer: Trainer, given: Mapping[str, Any], state: Path | None, *watching: Any, until: int, rolls_back: bool = False
) -> Iterator[None]:
    """In the block, the trainer has trained from a state, and has written nothing; afterwards it is as before.

    Must be entered by all ranks.

    Args:
        trainer: the trainer, which is not at work.
        given: the arguments of `train`.
        state: the training state; None for the beginning of the run.
        watching: callbacks, which see every event after the trainer's own.
        until: training ends after this update, or earlier with the run.
        rolls_back: follow a run that goes back to `state`. Else each update is seen once: one that is not finite is
            skipped.
    """
    changed: dict[str, Any] = {"max_duration": None, "resume_from": state}
    if given.get("nonfinite_policy") == "rollback" and not rolls_back:
        changed["nonfinite_policy"] = "skip"
    with kept() as before:
        Outside(given).keep(before, trainer)
        with rehearsal(trainer, [*taking_part(trainer.callback_handler), *watching, Until(until)]):
            trainer.train(**{**given, **changed})
            yield


class Until(TrainerCallback):
    """Ends a run after an update."""

    def __init__(self, update: int) -> None:
        self._update = update

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """End the run."""
        if trainer.run_state.updates == self._update:
            raise StopTrainingError(f"Update {self._update} is done.")


def refuse_shorter(trainer: Trainer, update: int) -> None:
    """Refuse a run that has ended before an update."""
    done = trainer.run_state.updates
    if done < update:
        raise ConfigurationError(f"There is no update {update}: with these arguments the run ends after {done}.")


def check_update(update: Any) -> None:
    """Refuse what is not the number of an update."""
    if isinstance(update, bool) or not isinstance(update, int) or update < 1:
        raise ConfigurationError(f"`update` is {update!r}, but updates are counted from 1. Pass a whole number.")


def nearest_state(trainer: Trainer, states: str | Path, update: int) -> Path | None:
    """The newest training state from before an update; None for the beginning of the run. The same on all ranks.

    Raises:
        ConfigurationError: if there is none, and the trainer is not at the beginning.
    """
    check_update(update)
    run = trainer.run_context
    found = run.parts.ranks.do_on_first(lambda: states_in(Path(states)))
    found.sort(key=lambda each: each[1]["updates"])
    before = [folder for folder, facts in found if facts["updates"] < update]
    if before:
        return before[-1]
    if not found:
        raise ConfigurationError(f"There is no training state in {states}. Check the path.")
    if run.asked.number:
        raise ConfigurationError(
            f"The oldest state in {states} is after update {found[0][1]['updates']}, so the updates before are reached "
            "from the first weights only, and this trainer has trained. Make it again, as the script does, and replay "
            "at once."
        )
    return None


def states_in(place: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The training state at `place`, or those in it, the oldest first, with their facts, if a run has saved them."""
    states = [(place, read_manifest(place))] if looks_like_state(place) else list_states(place)
    return [(folder, manifest.facts) for folder, manifest in states if "updates" in manifest.facts]
