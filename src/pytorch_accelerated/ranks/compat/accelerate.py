"""The state that accelerate shares in a process, what it leaves behind, and what is inside of its loaders."""

from __future__ import annotations

import copyreg
import warnings
from typing import Any

import tqdm

with warnings.catch_warnings():
    # Before accelerate imports it: in a notebook without ipywidgets it warns in red of bars that nobody shows there.
    warnings.simplefilter("ignore", tqdm.TqdmWarning)
    import tqdm.auto

from accelerate import Accelerator, PartialState
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

_ASKED_BY_TRAINER = "_precision_was_asked_for_by_a_trainer"
_SETTINGS, _KIND = "_settings_of_trainer", "_kind_of_group"
# The settings of a `DataLoader`, without what it makes batches of.
_LOADER_SETTINGS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip

# A broken-off pass over a loader that accelerate has prepared leaves weak references in this state of the process, and
# no `Accelerator` could be pickled any more.
copyreg.pickle(GradientState, lambda state: (GradientState, ()))


def has_process_state() -> bool:
    """Whether accelerate knows this process already. To ask publicly is to set it up."""
    return bool(PartialState._shared_state)


def forget_settings() -> None:
    """Let the next `Accelerator` have a precision and plugins of its own.

    accelerate keeps one set per process, and refuses another one until this private method was called. One with
    DeepSpeed also changes what the process says of its group.
    """
    AcceleratorState._reset_state()
    if PartialState._shared_state:
        kind = PartialState._shared_state["distributed_type"]
        PartialState._shared_state["distributed_type"] = PartialState._shared_state.setdefault(_KIND, kind)


def forget_other_precision(mixed_precision: str | None) -> None:
    """Before a trainer makes an `Accelerator`: forget settings whose precision does not fit; see `forget_settings`.

    A precision that another trainer asked for must not become this one's. One that the user's own `Accelerator` has
    stays, unless `mixed_precision` asks for another one.
    """
    shared = AcceleratorState._shared_state
    if shared and (mixed_precision or shared.get(_ASKED_BY_TRAINER)) and mixed_precision != shared["_mixed_precision"]:
        forget_settings()


def remember_settings(accelerator: Accelerator, *, trainer_asked: bool) -> None:
    """After a trainer has made `accelerator`, perhaps with settings that it asked for; see `forget_other_precision`."""
    if trainer_asked:
        AcceleratorState._shared_state[_ASKED_BY_TRAINER] = True
    setattr(accelerator, _SETTINGS, dict(AcceleratorState._shared_state))


def restore_settings(accelerator: Accelerator) -> None:
    """Before a trainer uses `accelerator`: give it its own settings again, if another one was made meanwhile."""
    settings, current = getattr(accelerator, _SETTINGS, None), AcceleratorState._shared_state
    # Others belong to the user, who may have changed them.
    ours = ("distributed_type", "deepspeed_plugins")
    if settings is not None and any(settings.get(name) is not current.get(name) for name in ours):
        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state.update(settings)
        PartialState._shared_state["distributed_type"] = settings["distributed_type"]


def forget_prepared(accelerator: Accelerator, model: Any) -> bool:
    """Let `accelerator` forget what it has prepared: it holds it for ever, and would not prepare `model` again.

    Its public ``free_memory`` also empties caches of the device and collects garbage, which takes long.

    Returns:
        Whether it had put another forward, with autocast, into `model`; the forward is still there.
    """
    attributes = getattr(model, "__dict__", {})
    attributes.pop("_is_accelerate_prepared", None)
    accelerator._models.clear()
    accelerator._optimizers.clear()
    return attributes.pop("_original_forward", None) is not None


def given_loader(loader: Any) -> Any:
    """The loader that accelerate has prepared `loader` from: the loop distributes its batches itself."""
    if not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        return loader
    prepared = loader.base_dataloader
    settings = {name: getattr(prepared, name) for name in _LOADER_SETTINGS}
    batches, dataset = prepared.batch_sampler, prepared.dataset
    if isinstance(dataset, IterableDataset) or batches is None:
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        return type(prepared)(dataset, prepared.batch_size, drop_last=prepared.drop_last, **settings)
    batches = batches.batch_sampler if isinstance(batches, BatchSamplerShard) else batches
    if type(batches) is not BatchSampler:
        return DataLoader(dataset, batch_sampler=batches, **settings)
    return DataLoader(dataset, batches.batch_size, sampler=batches.sampler, drop_last=batches.drop_last, **settings)
