"""The configuration of a run, fixed when it starts."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TrainerRunConfig:
    """The settings of a run, and the effective sizes that follow from them.

    After `Trainer.evaluate` alone, the fields about training are None. A "step" in these names is an optimizer
    update, which is the same on every rank. Sizes are None if a stream has no known length.

    Attributes:
        num_epochs: epochs that will be run.
        train_per_device_batch_size: samples of one batch on one rank.
        train_dl_kwargs: keyword arguments of the training loader, including defaults.
        eval_per_device_batch_size: the same for evaluation.
        eval_dl_kwargs: the same for evaluation.
        gradient_accumulation_steps: batches of one rank per update.
        gradient_clip_value: gradients are limited to [-value, value].
        train_total_batch_size: samples per update over all ranks.
        eval_total_batch_size: samples per evaluated batch over all ranks.
        num_update_steps_per_epoch: updates per epoch.
        num_local_update_steps_per_epoch: the same, since every rank takes part in every update.
        max_num_train_steps: updates after which the run ends.
        is_local_process_zero: whether this is the first rank of its node.
        is_world_process_zero: whether this is rank 0.
        is_distributed: whether there is more than one rank.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        num_processes: number of ranks.
        seed: determines the order of samples and the randomness of batches.
        gradient_clip_norm: limit of the global gradient norm.
        train_dataloader_len: batches of one rank per training epoch.
        eval_dataloader_len: batches of one rank per evaluation.
        lanes: as given to the trainer; where it is not None, "one rank" above means one lane.
    """

    num_epochs: int | None
    train_per_device_batch_size: int | None
    train_dl_kwargs: Mapping[str, Any] | None
    eval_per_device_batch_size: int | None
    eval_dl_kwargs: Mapping[str, Any] | None
    gradient_accumulation_steps: int | None
    gradient_clip_value: float | None
    train_total_batch_size: int | None
    eval_total_batch_size: int | None
    num_update_steps_per_epoch: int | None
    num_local_update_steps_per_epoch: int | None
    max_num_train_steps: int | None
    is_local_process_zero: bool
    is_world_process_zero: bool
    is_distributed: bool
    mixed_precision: str
    num_processes: int
    seed: int | None = None
    gradient_clip_norm: float | Mapping[str, float | None] | Sequence[float | None] | None = None
    train_dataloader_len: int | None = None
    eval_dataloader_len: int | None = None
    lanes: int | None = None

    def __getitem__(self, name: str) -> Any:
        """``run_config["num_epochs"]`` is ``run_config.num_epochs``.

        Raises:
            KeyError: if there is no field of that name.
        """
        return vars(self)[name]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values (None, bool, int, float, str, lists and dicts of them), ready for JSON.

        Anything else among the loader's keyword arguments, such as a sampler or a function, is named by its class.
        """
        return {field.name: plain_value(getattr(self, field.name)) for field in dataclasses.fields(self)}


def plain_value(value: Any) -> Any:
    """`value` if it is plain, in a form ready for JSON; anything else is named by its class."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return getattr(value, "__qualname__", type(value).__qualname__)
