"""Goes back to an update of a training of the Hugging Face trainer; see `pytorch_accelerated.extras.proving.replay`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.extras.huggingface.trackers import Recorder
from pytorch_accelerated.extras.looking.rehearsal import rehearsal
from pytorch_accelerated.extras.proving.replay import Replay, WatchedUpdate
from pytorch_accelerated.extras.proving.rewind import Until, nearest_state, refuse_shorter
from pytorch_accelerated.huggingface.checkpoints.states import read_trainer_state
from pytorch_accelerated.huggingface.trainer_callback import PrinterCallback, ProgressCallback
from pytorch_accelerated.huggingface.trainer_utils import sort_checkpoints
from pytorch_accelerated.ranks.keeping import kept

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.engine import Engine
    from pytorch_accelerated.huggingface.trainer import Trainer


def replay(face: Trainer, engine: Engine, checkpoints: str | Path, update: int, debug: bool) -> Replay:
    """The replay of `Trainer.replay`. Must be called by all ranks."""
    state = nearest_state(engine, checkpoints, update)

    def loss_of(row: Any) -> Any:
        with face.compute_loss_context_manager():
            return face.compute_loss(face.model, row)

    moment = WatchedUpdate(update, debug, loss_of=loss_of)
    with kept() as before:
        for part in (face, face.control, face.callback_handler, *face.callback_handler.callbacks):
            before.object(part)
        face.args = copy.copy(face.args)
        vars(face.args).update(save_strategy="no", load_best_model_at_end=False, report_to=[])
        face.callback_handler.callbacks = [each for each in face.callback_handler.callbacks if not _shows(each)]
        with rehearsal(engine, [*engine.callback_handler, moment, Until(update)]):
            face.train(resume_from_checkpoint=None if state is None else str(state))
            refuse_shorter(engine, update)
            found = dict(moment.found)
    return Replay(update=update, state=state, recorded_loss=_logged_loss(Path(checkpoints), update), **found)


def _shows(callback: Any) -> bool:
    """Whether a callback shows or reports something."""
    is_ours = isinstance(callback, (PrinterCallback, ProgressCallback, Recorder))
    return is_ours or type(callback).__module__.startswith("transformers.integrations")


def _logged_loss(place: Path, update: int) -> float | None:
    """The loss that the training has logged for one update."""
    checkpoints = sort_checkpoints(place) or [str(place)]
    logs = read_trainer_state(Path(checkpoints[-1])).log_history
    losses = {entry["step"]: entry["loss"] for entry in logs if "loss" in entry}
    return losses.get(update) if update == 1 or update - 1 in losses else None
