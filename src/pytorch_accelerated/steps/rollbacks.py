"""Finds the training state that a run goes back to after an update that could not be applied."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.checkpointing.verify import list_states, verify
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.training.saves import Saves


class RollBack(Exception):
    """Ends the current work on all ranks, so that the run can resume from a training state.

    Attributes:
        state: the folder of that state.
    """

    def __init__(self, state: Path) -> None:
        super().__init__()
        self.state = state


class Rollbacks:
    """Finds the training state that a run can go back to.

    States that are already in the folders of the callbacks when this is created belong to other runs.

    Args:
        callbacks: the callbacks of the trainer.
        saves: the saves of the run.
        resumed_from: the training state that the run was resumed from, if any.
        is_first: whether this is rank 0, the only one that looks at folders.
    """

    def __init__(self, callbacks: Iterable[Any], saves: Saves, resumed_from: Path | None, *, is_first: bool) -> None:
        self._saves = saves
        self._resumed_from = resumed_from
        self._newest_of_others: dict[Path, int] = {}
        for saver in savers_among(callbacks) if is_first else ():
            serials = [manifest.serial for _, manifest in list_states(Path(saver.save_dir))]
            self._newest_of_others[Path(saver.save_dir)] = max(serials, default=0)

    def finish_saves(self) -> None:
        """Wait for states that are being written. Must be called by all ranks."""
        self._saves.finish()

    def newest_state(self) -> Path | None:
        """The newest valid training state of this run. For rank 0."""
        states = [
            (manifest.facts["updates"], manifest.serial, folder)
            for place, newest_of_others in self._newest_of_others.items()
            for folder, manifest in list_states(place)
            if manifest.serial > newest_of_others and "updates" in manifest.facts
        ]
        folders = [folder for *_, folder in sorted(states, reverse=True)]
        for folder in [*folders, *([self._resumed_from] if self._resumed_from is not None else [])]:
            try:
                verify(folder)
            except InvalidCheckpointError:
                continue
            return folder
        return None


def savers_among(callbacks: Iterable[Any]) -> list[SaveTrainingStateCallback]:
    """The callbacks that save training states."""
    return [callback for callback in callbacks if isinstance(callback, SaveTrainingStateCallback)]
