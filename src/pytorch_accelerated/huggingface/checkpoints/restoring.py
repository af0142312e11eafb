"""The states of a run as transformers has them, file by file, and how a run resumes from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.seeding import check_generator_states, generator_states, restore_generator_states
from pytorch_accelerated.huggingface.checkpoints.saving import TRAINER_STATE_NAME, find_checkpoint
from pytorch_accelerated.huggingface.events import TrainerControl, TrainerState
from pytorch_accelerated.huggingface.trainer_utils import warn
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.disk import is_file, kind_of
from pytorch_accelerated.states.loading import checked_states, load_states
from pytorch_accelerated.states.optimizers import OPTIMIZER_FILE as OPTIMIZER_NAME
from pytorch_accelerated.states.optimizers import without_callables
from pytorch_accelerated.states.portable import load_portable
from pytorch_accelerated.states.run_folder import agree_on_resuming

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.engine import Engine

SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
# The fields that a resumed run keeps. The others follow from its arguments, which may have changed.
_KEPT = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# The callbacks whose states find the records of a run in trackers again; they have no settings that could differ.
_RECORDS = ("ReportingCallback", "TensorBoardCallback")


def read_trainer_state(folder: Path) -> TrainerState:
    """The state in a checkpoint."""
    path = folder / TRAINER_STATE_NAME
    if not is_file(path):
        raise InvalidCheckpointError(f"{folder} has no {TRAINER_STATE_NAME}, which has the progress of the run.")
    return TrainerState.load_from_json(path)


def agreed_checkpoint(source: Any, output_dir: Path, ranks: Ranks) -> Path | None:
    """The checkpoint for `resume_from_checkpoint`, the same on all ranks; None to start. All ranks must call it."""
    if source is None or source is False:
        agree_on_resuming(None, ranks)
        return None
    path = None if source is True else Path(source)
    agree_on_resuming(path or output_dir, ranks)

    def find() -> Path | None:
        found = find_checkpoint(path, output_dir)
        return None if found is None else found.absolute()

    return ranks.do_on_first(find)


def restore_state(
    state: TrainerState, saved: TrainerState, args: TrainingArguments, ranks: Ranks, folder: Path
) -> None:
    """Restore counts, log history and best model of the checkpoint `folder`. What follows from arguments may differ."""
    for name in _KEPT:
        setattr(state, name, getattr(saved, name))
    best = state.best_model_checkpoint
    if best is not None and not ranks.from_first(Path(best).is_dir()):  # the folder may have moved
        best = state.best_model_checkpoint = str(folder.with_name(Path(best).name))
    if best is not None and not ranks.from_first(Path(best).is_dir()):
        warn_user(
            ranks,
            f"The best checkpoint so far, {best} ({state.best_metric}), no longer exists. The search for the best "
            "model restarts.",
        )
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
    if args.restore_callback_states_from_checkpoint:
        state.stateful_callbacks = saved.stateful_callbacks
    else:
        states = saved.stateful_callbacks
        state.stateful_callbacks.update({name: states[name] for name in _RECORDS if name in states})


def restore_callbacks(callbacks: list[Any], states: Mapping[str, Any]) -> TrainerControl | None:
    """Replace callbacks, those of a class in order, by new ones made from `states`. Returns the control among these."""
    left = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    for index, callback in enumerate(callbacks):
        waiting = left.get(type(callback).__name__)
        if waiting and hasattr(callback, "from_state"):
            callbacks[index] = type(callback).from_state({"args": {}, "attributes": {}, **waiting.pop(0)})
    controls = left.pop(TrainerControl.__name__, None)
    missing = [name for name, waiting in left.items() if waiting]
    if missing:
        warn(
            f"The checkpoint has states of the callbacks {', '.join(missing)}, which this trainer does not have. They "
            "are ignored.",
        )
    return TrainerControl.from_state(controls[0]) if controls else None


def states_of_optimizer(engine: Engine, model: Any) -> dict[str, Any]:
    """The states of optimizer and schedule, by file name. All ranks must call it."""
    # Each rank writes its shard of a sharded optimizer with the native state.
    optimizer = None if has_shards(model) else without_callables(engine.optimizer.state_dict())
    scheduler = None if engine.scheduler is None else engine.scheduler.state_dict()
    states = {OPTIMIZER_NAME: optimizer, SCHEDULER_NAME: scheduler}
    return {name: dict(state) for name, state in states.items() if state is not None}


def generators_of_all(ranks: Ranks) -> dict[str, Any]:
    """The states of all ranks' random generators, by file name. All ranks must call it."""
    generators = ranks.exchange(known_generator_states(is_alone=ranks.count == 1))
    return {_rng_state_name(rank, ranks): state for rank, state in enumerate(generators)}


def take_over_foreign(engine: Engine, folder: Path, updates: int, load_weights: Callable[[], None]) -> None:
    """Resume from a folder without native parts, as far as its files allow. All ranks must call it.

    The position in the data is computed from updates of this run. All files are read before anything is changed.

    Raises:
        InvalidCheckpointError: if a file holds more than tensors and plain values, or does not fit.
    """
    paths = [folder / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME)]
    optimizer, scheduler, scaler = (load_portable(path) if is_file(path) else None for path in paths)
    generators = read_generator_states(folder / _rng_state_name(engine.ranks.index, engine.ranks))
    states = checked_states([(engine.optimizer, optimizer)], source=folder / OPTIMIZER_NAME)
    states += checked_states([(engine.scheduler, scheduler), (engine.accelerator.scaler, scaler)], source=folder)
    load_states(states, load_weights, engine.optimizer, source=folder)
    if generators is not None:
        restore_generator_states(generators)
    missing = [name for name, state in ((OPTIMIZER_NAME, optimizer), (SCHEDULER_NAME, scheduler)) if state is None]
    if missing:
        warn_user(
            engine.ranks,
            f"{folder} has no {' and no '.join(missing)}: the run resumes with the weights, but with a new "
            "optimizer state. Save without `save_only_model` to resume exactly.",
        )
    engine.run_state = _position(engine, updates)


def _rng_state_name(rank: int, ranks: Ranks) -> str:
    return f"rng_state_{rank}.pth" if ranks.count > 1 else "rng_state.pth"


def _position(engine: Engine, updates: int) -> RunState:
    """The position after so many updates of this run's size."""
    per_epoch = engine.run_context.loaders.train.num_updates
    per_update = engine.run_config.train_total_batch_size or 1
    epochs, rest = divmod(updates, per_epoch) if per_epoch else (0, updates)
    if not rest and updates:
        return RunState(epochs=epochs, updates=updates, phase=RunPhase.EPOCH_CLOSED)
    batches = rest * (engine.run_context.settings.gradient_accumulation_steps or 1)
    return RunState(
        epochs=epochs,
        updates=updates,
        updates_in_epoch=rest,
        batches_in_epoch=batches,
        samples_in_epoch=rest * per_update,
    )


def known_generator_states(*, is_alone: bool) -> dict[str, Any]:
    """The states of this process's generators for transformers, made of plain values and tensors.

    If the process is alone, transformers expects the state of its GPU, else of all GPUs.
    """
    states = generator_states()
    algorithm, keys, *rest = states["numpy"]
    known = {"python": random.getstate(), "numpy": (algorithm, keys.tolist(), *rest), "cpu": states["torch"]}
    if "cuda" in states:
        known["cuda"] = states["cuda"][torch.cuda.current_device()] if is_alone else states["cuda"]
    return known


def read_generator_states(path: Path) -> dict[str, Any] | None:
    """Read a file of transformers or of this library for `seeding.restore_generator_states`; None without a file."""
    if kind_of(path) is None:
        return None
    try:
        with torch.serialization.safe_globals(_OF_ARRAYS):
            states = _native(load_portable(path))
        check_generator_states(states)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). It holds the states of random generators; "
            "delete it to resume with other random numbers."
        ) from error
    return states


class _PlainType:
    """Stands for a dtype of numpy in a file of others: plain numbers only."""

    def __init__(self, code: str, *_: Any) -> None:
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in "biuf":
            raise ValueError(f"an array of {self.dtype}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _PlainArray:
    """Stands for an array of numpy in a file of others.

    Numpy's own functions trust what they are given: an array of objects made of raw bytes has forged pointers.
    """

    def __init__(self, *_: Any) -> None:
        self.values = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, _, data = state
        self.values = np.frombuffer(data, kind.dtype).reshape(shape)


# Older versions of numpy had another name for the module.
_OF_ARRAYS: list[Any] = [(_PlainArray, "numpy.ndarray"), (_PlainType, "numpy.dtype")]
_OF_ARRAYS += [(_PlainArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]


def _native(known: dict[str, Any]) -> dict[str, Any]:
    algorithm, keys, *rest = known["numpy"]
    values = keys.values if isinstance(keys, _PlainArray) else keys
    numpy_state = [algorithm, torch.from_numpy(np.array(values, dtype=np.int64)), *rest]
    states = {"torch": known["cpu"], "numpy": numpy_state, "random": known["python"]}
    if "cuda" in known and torch.cuda.is_available():
        states["cuda"] = known["cuda"]
        if isinstance(known["cuda"], torch.Tensor):
            states["cuda"] = torch.cuda.get_rng_state_all()
            states["cuda"][torch.cuda.current_device()] = known["cuda"]
    return states
